//! The store of what setup has made: in the checkout, unless another user could change it there.
//! Agents start no QEMU that others can replace, and the lab's QEMU is in the store.

use std::path::{Path, PathBuf};
use std::{env, fs};

use qemu::programs;

use crate::error::{FileContext, Result};
use crate::program;
use crate::setup::say;

/// Environment variable with the store's path, which takes precedence.
pub(crate) const VARIABLE: &str = "DROVEWAY_LAB";
const OF_ROOT: &str = "/var/cache";
const NAME: &str = "droveway-lab";

/// The repository's root.
#[must_use]
pub fn repository() -> PathBuf {
    let workshop = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    workshop.and_then(Path::parent).map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// The directory of what setup has made.
#[must_use]
pub fn store() -> PathBuf {
    env::var_os(VARIABLE).map_or_else(usual, PathBuf::from)
}

/// Makes the directory; reports it if it is outside the checkout.
pub(super) fn create() -> Result<PathBuf> {
    let store = store();
    let new = !store.is_dir();
    fs::create_dir_all(&store).at("create", &store)?;
    if new && !store.starts_with(repository()) {
        say(&format!("what the lab needs is kept in {}", store.display()));
    }
    Ok(store)
}

/// Gives a file these bytes, by a rename, so that a guest that boots meanwhile never sees half of
/// them.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let partial = path.with_extension(std::process::id().to_string());
    fs::write(&partial, bytes).at("write", &partial)?;
    fs::rename(&partial, path).at("create", path)
}

/// Removes the store, but not one that [`VARIABLE`] names, which others may use.
///
/// # Errors
/// If it can't be removed.
pub fn remove_store() -> Result<()> {
    for store in [repository().join(".lab"), usual()] {
        if store.is_dir() {
            fs::remove_dir_all(&store).at("remove", &store)?;
        }
    }
    Ok(())
}

fn usual() -> PathBuf {
    let checkout = repository();
    if programs::is_trusted(&checkout) {
        return checkout.join(".lab");
    }
    caches().join(NAME).join(name_of(&checkout))
}

fn caches() -> PathBuf {
    if program::root() {
        return PathBuf::from(OF_ROOT);
    }
    let of_user = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let of_user = of_user.filter(|dir| dir.is_absolute());
    of_user.unwrap_or_else(|| Path::new(&env::var_os("HOME").unwrap_or_default()).join(".cache"))
}

/// Each checkout has a store of its own, since their guests differ.
fn name_of(checkout: &Path) -> String {
    checkout.display().to_string().trim_start_matches('/').replace('/', "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_checkout_has_a_store() {
        assert_eq!(name_of(Path::new("/tmp/a/droveway")), "tmp-a-droveway");
    }
}
