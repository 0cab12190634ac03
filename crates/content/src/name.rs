//! The name of a page's content: a keyed hash of its bytes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// 160 bits: among 2^40 pages of a cluster, any two share a name with a probability of 2^-81.
pub const NAME_BYTES: usize = 20;

/// The name of one page's content, in one domain.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub [u8; NAME_BYTES]);

impl Name {
    /// The first 64 bits, as evenly spread as any.
    #[must_use]
    pub fn prefix(&self) -> u64 {
        let (first, _) = self.0.split_first_chunk().expect("a name is longer");
        u64::from_le_bytes(*first)
    }
}

/// The whole name in hex, for messages.
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}..", self.prefix())
    }
}

/// A sharing domain: VMs whose owners may learn, by how long a migration takes, what another VM
/// of the domain has in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Domain(pub String);

/// The key of names. It is made of the cluster's secret, so that no guest can make content for a
/// name, and of the domain, so that equal content has different names in different domains:
/// content without a common name can't be shared.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

/// Separates this use of the cluster's secret from all others: they have no key in common.
const PURPOSE: &str = "droveway 2026-11 names of page contents";

impl Key {
    /// The key of `domain` in the cluster that has `secret`.
    #[must_use]
    pub fn new(secret: &[u8], domain: &Domain) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(PURPOSE);
        hasher.update(&(secret.len() as u64).to_le_bytes());
        hasher.update(secret);
        hasher.update(domain.0.as_bytes());
        Self(*hasher.finalize().as_bytes())
    }

    /// The name of these bytes.
    #[must_use]
    pub fn name(&self, bytes: &[u8]) -> Name {
        let hash = blake3::keyed_hash(&self.0, bytes);
        let (name, _) = hash.as_bytes().split_first_chunk().expect("a hash is longer");
        Name(*name)
    }

    /// The key's fingerprint, which both ends compare to check that they have the same key. It
    /// does not reveal the key.
    #[must_use]
    pub fn print(&self) -> Name {
        self.name(b"the print of this key")
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_content_has_another_name_with_another_secret_or_in_another_domain() {
        let key =
            |secret: &str, domain: &str| Key::new(secret.as_bytes(), &Domain(domain.to_owned()));
        let page = [7; page::PAGE_BYTES];
        let name = key("secret", "").name(&page);
        assert_eq!(key("secret", "").name(&page), name);
        for other in [key("secre", ""), key("secret", "a"), key("secre", "t"), key("", "secret")] {
            assert_ne!(other.name(&page), name);
            assert_ne!(other.print(), key("secret", "").print());
        }
        let mut changed = page;
        changed[4095] ^= 1;
        assert_ne!(key("secret", "").name(&changed), name);
        assert!(!format!("{:?}", key("secret", "")).contains("115"));
    }
}
