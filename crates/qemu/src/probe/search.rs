//! Where a program is.

use std::env;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The file that would be executed for `program` in `cwd`: with a `/` in it a
/// path, else the first of that name in PATH.
#[must_use]
pub fn find(program: &str, cwd: &Path) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(cwd.join(program)).filter(|path| is_program(path));
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|dir| dir.join(program)).find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let here = Path::new("/bin");
        assert_eq!(find("./sh", here), Some("/bin/./sh".into()));
        assert!(find("sh", Path::new("/nowhere")).is_some());
        for none in ["/etc/passwd", "/bin", "no-such-program", ""] {
            assert_eq!(find(none, here), None, "{none}");
        }
    }
}
