//! Host names, as in certificates and the peers file.

use std::fmt;
use std::sync::Arc;

use identity::{NameError, check_name};

/// A host's name. Clones share its text.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(Arc<str>);

impl HostName {
    /// Checks and makes a name.
    ///
    /// # Errors
    /// If the text is not a valid name.
    pub fn new(name: &str) -> Result<Self, NameError> {
        check_name(name)?;
        Ok(Self(name.into()))
    }

    /// From a peer's bytes.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, NameError> {
        Self::new(&String::from_utf8_lossy(bytes))
    }

    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
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
    use identity::LETTERS_MAX;

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
