//! Host names, as in certificates and the peers file.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The most characters in a name.
pub(crate) const LETTERS_MAX: usize = 64;

/// A host's name. Clones share its text.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(Arc<str>);

/// A text that is not a valid host name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a name: use 1 to {LETTERS_MAX} of A-Z a-z 0-9 . _ - and start with a letter or \
     digit"
)]
pub struct HostNameError(String);

impl HostName {
    /// Checks and makes a name.
    ///
    /// # Errors
    /// If the text is not a valid name.
    pub fn new(name: &str) -> Result<Self, HostNameError> {
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let is_name = (1..=LETTERS_MAX).contains(&name.len())
            && name.bytes().all(is_letter)
            && name.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric);
        if is_name {
            return Ok(Self(name.into()));
        }
        // The error repeats no more of a peer's text than a name may have.
        Err(HostNameError(name.chars().take(LETTERS_MAX).collect()))
    }

    /// From a peer's bytes.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, HostNameError> {
        Self::new(&String::from_utf8_lossy(bytes))
    }

    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HostName {
    type Err = HostNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::new(text)
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_certificates_can_have() {
        for name in ["a", "host-1", "Rack2.host_7", "0", &"x".repeat(LETTERS_MAX)] {
            assert_eq!(HostName::new(name).unwrap().as_str(), name);
        }
        for text in ["", "-a", ".a", "a b", "a/b", "\u{e4}", "a\0", &"x".repeat(LETTERS_MAX + 1)] {
            assert!(HostName::new(text).is_err(), "{text}");
        }
        let error = HostName::from_bytes(&[0xff; 5000]).unwrap_err();
        assert!(error.to_string().len() < 400);
    }
}
