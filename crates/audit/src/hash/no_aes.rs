//! For processors without the hash made of AES rounds.

/// Never exists: this processor has no such hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aes {}

impl Aes {
    pub(super) fn detect() -> Option<Self> {
        None
    }

    pub(super) fn hash(self, _: &[u8]) -> u64 {
        match self {}
    }
}
