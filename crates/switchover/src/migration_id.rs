//! The name of one migration, the same on both sides.

use std::fmt;
use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The longest id.
const LETTERS_MAX: usize = 64;

/// A migration's id: letters, digits and `-`. It becomes a file's name and may come from a peer, so
/// it is checked on creation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MigrationId(Arc<str>);

/// A text that is not a valid migration id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a migration's id has 1 to {LETTERS_MAX} letters, digits and hyphens, and starts with no hyphen"
)]
pub struct NotAnId;

impl MigrationId {
    /// Checks a text.
    ///
    /// # Errors
    /// If it has other characters, or too many.
    pub fn new(text: &str) -> Result<Self, NotAnId> {
        let sound = text.bytes().all(|letter| letter.is_ascii_alphanumeric() || letter == b'-');
        if !sound || text.is_empty() || text.len() > LETTERS_MAX || text.starts_with('-') {
            return Err(NotAnId);
        }
        Ok(Self(text.into()))
    }

    /// A unique id of 128 random bits. Nothing else tells old messages and old journals from new
    /// ones.
    ///
    /// # Errors
    /// If the kernel provides no randomness.
    pub fn random() -> io::Result<Self> {
        let mut bits = [0; 16];
        let mut filled = 0;
        while filled < bits.len() {
            filled += rustix::rand::getrandom(
                &mut bits[filled..],
                rustix::rand::GetRandomFlags::empty(),
            )?;
        }
        Ok(Self(format!("{:032x}", u128::from_be_bytes(bits)).into()))
    }

    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for MigrationId {
    type Error = NotAnId;

    fn try_from(text: String) -> Result<Self, NotAnId> {
        Self::new(&text)
    }
}

impl From<MigrationId> for String {
    fn from(id: MigrationId) -> Self {
        id.as_str().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_never_a_path() {
        for text in ["", "..", "../x", "a/b", "a.b", "-a", "a b", "é", &"a".repeat(65)] {
            assert_eq!(MigrationId::new(text), Err(NotAnId), "{text}");
        }
        for text in ["a", "7f3a", "web1-2", &"a".repeat(64)] {
            assert_eq!(MigrationId::new(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn random_ids_differ_and_are_valid() {
        let (one, other) = (MigrationId::random().unwrap(), MigrationId::random().unwrap());
        assert_ne!(one, other);
        assert_eq!(MigrationId::new(one.as_str()).unwrap(), one);
    }

    #[test]
    fn a_peer_cannot_send_an_invalid_id() {
        assert!(serde_json::from_str::<MigrationId>("\"../../etc\"").is_err());
    }
}
