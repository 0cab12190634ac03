//! Memory for direct I/O.

use page::Buffer as Mapped;

/// The alignment of the memory, and the largest that a device may require of
/// requests.
pub const ALIGNMENT_MAX: usize = 64 << 10;

/// Bytes that start at an aligned address.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Mapped,
    from: usize,
}

impl Buffer {
    /// Zeroes, which take no memory before they are written.
    ///
    /// # Panics
    /// If the system has no memory for them.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let all = Mapped::new(bytes + ALIGNMENT_MAX);
        let from = all.as_ptr().align_offset(ALIGNMENT_MAX);
        Self { bytes: all, from }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.bytes.get(self.from..).unwrap_or_default()
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.from..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_aligned_and_large_enough() {
        for bytes in [0, 1, 4096, 1 << 20] {
            let mut buffer = Buffer::new(bytes);
            assert!(buffer.as_ref().len() >= bytes);
            assert_eq!(buffer.as_mut().as_ptr().addr() % ALIGNMENT_MAX, 0);
        }
        assert!(Buffer::default().as_ref().is_empty());
    }
}
