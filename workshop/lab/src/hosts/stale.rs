//! Removal of what a killed lab has left.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::PREFIX;
use super::namespace::remove;
use crate::error::Result;
use crate::{program, systemd};

/// Removes the hosts of labs whose process has ended, with all processes on them.
///
/// # Errors
/// If `ip` fails.
pub fn clean() -> Result<()> {
    remove_where(|pid| !Path::new("/proc").join(pid).exists())
}

fn remove_where(made_by: impl Fn(&str) -> bool) -> Result<()> {
    let list = program::output(program::command("ip").args(["netns", "list"]))?;
    for name in list.lines().filter_map(|line| line.split_whitespace().next()) {
        if !maker(name).is_some_and(&made_by) {
            continue;
        }
        if let Err(error) = remove(name)
            && is_there(name)?
        {
            return Err(error);
        }
    }
    systemd::remove_stale(|name| maker(name).is_some_and(&made_by));
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_str().and_then(maker).is_some_and(&made_by) {
            // Another lab may have removed it.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Whether a namespace exists: another lab may have removed it meanwhile.
fn is_there(name: &str) -> Result<bool> {
    let list = program::output(program::command("ip").args(["netns", "list"]))?;
    Ok(list.lines().any(|line| line.split_whitespace().next() == Some(name)))
}

/// Set once this process is about to end.
static ABANDONED: AtomicBool = AtomicBool::new(false);

/// Removes this process's own hosts: for a process that was interrupted, before it ends. Threads
/// that drop a host meanwhile wait for that end.
///
/// # Errors
/// If `ip` fails.
pub fn abandon() -> Result<()> {
    ABANDONED.store(true, Ordering::Relaxed);
    let own = std::process::id().to_string();
    remove_where(|pid| pid == own)
}

/// Blocks for ever once [`abandon`] was called: errors of such a thread don't matter any more.
pub(super) fn wait_if_abandoned() {
    while ABANDONED.load(Ordering::Relaxed) {
        std::thread::park();
    }
}

/// The process ID in a host's name.
fn maker(name: &str) -> Option<&str> {
    let pid = name.strip_prefix(PREFIX)?.split('-').next()?;
    pid.bytes().all(|byte| byte.is_ascii_digit()).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_labs_own_names_count() {
        assert_eq!(maker("dw-123-0a"), Some("123"));
        assert_eq!(maker("dw-x-0a"), None);
        assert_eq!(maker("other-123-0a"), None);
    }
}
