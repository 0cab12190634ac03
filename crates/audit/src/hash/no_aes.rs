//! Where there is no hash by rounds of AES.

/// This processor has AES.
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
