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

/// The agent's file, in which `url` under `[webhook]` has a password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Password(PathBuf);

impl Password {
    pub(super) fn in_file(file: PathBuf) -> Self {
        Self(file)
    }

    /// How other users of this host can read it now; none if they can't.
    pub(crate) fn exposure(&self) -> Option<String> {
        let Self(file) = self;
        let mode = fs::metadata(file).ok()?.permissions().mode();
        (mode & 0o004 != 0).then(|| {
            format!(
                "every user of this host can read {}, where url under [webhook] has a password",
                file.display()
            )
        })
    }
}

/// Whether a URL has a password, or what may be one.
pub(super) fn has_password(url: &str) -> bool {
    let Some((_, rest)) = url.split_once("://") else { return false };
    let (host, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let in_front = host.rsplit_once('@').is_some_and(|(user, _)| user.contains(':'));
    // Receivers of events may call it anything.
    in_front || path.contains('?')
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
            ("https://a:hunter2@[::1]:8443/hook", true, "https://[::1]:8443/hook"),
            ("https://example.org/hook?token=hunter2", true, "https://example.org/hook"),
            ("https://reader@example.org/hook", false, "https://example.org/hook"),
            ("https://example.org/hook", false, "https://example.org/hook"),
            ("a:hunter2@example.org", false, "example.org"),
            ("auto", false, "auto"),
        ] {
            assert_eq!((has_password(url), shown(url).as_str()), (expected, said), "{url}");
        }
    }

    #[test]
    fn a_password_is_exposed_by_a_file_that_all_can_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("agent.toml");
        fs::write(&file, "").unwrap();
        let password = Password::in_file(file.clone());
        for (mode, expected) in [(0o600, false), (0o640, false), (0o644, true)] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let exposure = password.exposure();
            assert_eq!(exposure.is_some(), expected, "{mode:o}");
            assert!(exposure.is_none_or(|text| text.contains("agent.toml, where url under")));
        }
    }
}
