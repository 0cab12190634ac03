//! Settings that are secret, or may have a password in them, and who can read them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::error::ConfigError;

/// Reads a file that no user but its owner, and its group, may read or write.
pub(super) fn read_private(file: &Path) -> Result<String, ConfigError> {
    let unreadable = |source| ConfigError::Unreadable { file: file.to_owned(), source };
    let mode = fs::metadata(file).map_err(unreadable)?.permissions().mode();
    if mode & 0o007 != 0 {
        return Err(ConfigError::Open(file.to_owned()));
    }
    fs::read_to_string(file).map_err(unreadable)
}

/// A setting that has a password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Password {
    setting: &'static str,
    /// The file that it stands in; none if it is an argument.
    file: Option<PathBuf>,
}

impl Password {
    pub(super) fn new(setting: &'static str, file: Option<PathBuf>) -> Self {
        Self { setting, file }
    }

    /// How other users of this host can read it now; none if they can't.
    pub(crate) fn exposure(&self) -> Option<String> {
        let setting = self.setting;
        let Some(file) = &self.file else {
            return Some(format!(
                "the password in --{setting} is in the list of processes, for every user of this \
                 host"
            ));
        };
        let mode = fs::metadata(file).ok()?.permissions().mode();
        (mode & 0o004 != 0).then(|| {
            let file = file.display();
            format!("every user of this host can read {file}, where {setting} has a password")
        })
    }
}

/// Whether a URL has a password, or what may be one.
pub(super) fn has_password(url: &str) -> bool {
    let Some((scheme, rest)) = url.split_once("://") else { return false };
    let (host, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let in_front = host.rsplit_once('@').is_some_and(|(user, _)| user.contains(':'));
    // Receivers of events may call it anything.
    let parameter = if scheme.starts_with("redis") { "pass=" } else { "?" };
    in_front || path.contains(parameter)
}

/// A URL for messages: without user and password, and without what may be a token.
pub(super) fn shown(url: &str) -> String {
    let url = url.split('?').next().unwrap_or_default();
    match (url.split_once("://"), url.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        (None, Some((_, host))) => host.to_owned(),
        (_, None) => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_in_urls_are_found_and_not_shown() {
        for (url, expected, said) in [
            ("redis://10.0.0.9:6379/1", false, "redis://10.0.0.9:6379/1"),
            ("redis://reader@10.0.0.9", false, "redis://10.0.0.9"),
            ("redis://:hunter2@10.0.0.9", true, "redis://10.0.0.9"),
            ("redis+unix:///run/redis.sock?pass=hunter2", true, "redis+unix:///run/redis.sock"),
            ("redis+unix:///run/redis.sock?db=1", false, "redis+unix:///run/redis.sock"),
            ("https://a:hunter2@[::1]:8443/hook", true, "https://[::1]:8443/hook"),
            ("https://example.org/hook?token=hunter2", true, "https://example.org/hook"),
            ("https://example.org/hook", false, "https://example.org/hook"),
            ("a:hunter2@example.org", false, "example.org"),
            ("auto", false, "auto"),
        ] {
            assert_eq!((has_password(url), shown(url).as_str()), (expected, said), "{url}");
        }
    }

    #[test]
    fn a_password_is_exposed_by_arguments_and_by_files_that_all_can_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("agent.toml");
        fs::write(&file, "").unwrap();
        let in_file = Password::new("directory", Some(file.clone()));
        for (mode, expected) in [(0o600, false), (0o640, false), (0o644, true)] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let exposure = in_file.exposure();
            assert_eq!(exposure.is_some(), expected, "{mode:o}");
            assert!(exposure.is_none_or(|text| text.contains("agent.toml, where directory has")));
        }
        let argument = Password::new("directory", None).exposure().unwrap();
        assert!(argument.contains("--directory is in the list of processes"), "{argument}");
    }
}
