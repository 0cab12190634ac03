//! Memory for content of guests.
//!
//! Each buffer is a mapping of its own, which goes back to the kernel at once when the
//! buffer is dropped. The heap would keep it, for each thread that has used it: hundreds
//! of megabytes after some migrations, with pages of guests that have left.

use std::ops::{Deref, DerefMut};

use memmap2::{Advice, MmapMut};

/// Bytes that are zero at first, and take no memory before they are written. Nothing of
/// them is left after a drop, and a core dump of this process does not have them.
#[derive(Debug, Default)]
pub struct Buffer {
    /// None if it is empty.
    mapped: Option<MmapMut>,
}

impl Buffer {
    /// A buffer of this size.
    ///
    /// # Panics
    /// If the system has no memory for it.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        if bytes == 0 {
            return Self::default();
        }
        let mapped = MmapMut::map_anon(bytes).expect("the system has memory for a buffer");
        // A kernel without core dumps refuses, and needs no such advice.
        let _ = mapped.advise(Advice::DontDump);
        Self { mapped: Some(mapped) }
    }

    /// The first bytes, for new content: if the buffer is smaller, it is replaced by a
    /// larger one. It doubles, so that few of a migration's batches have it replaced.
    ///
    /// # Panics
    /// As [`Buffer::new`].
    pub fn room(&mut self, bytes: usize) -> &mut [u8] {
        if self.len() < bytes {
            // Before, so that there are not two.
            *self = Self::default();
            *self = Self::new(bytes.next_power_of_two());
        }
        &mut self[..bytes]
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.mapped.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.mapped.as_deref_mut().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_grows_and_stays() {
        let mut buffer = Buffer::default();
        assert!(buffer.is_empty() && buffer.room(0).is_empty());
        buffer.room(5000).fill(3);
        let address = buffer.as_ptr();
        assert_eq!(buffer.room(100), [3; 100]);
        assert_eq!((buffer.room(8192).len(), buffer.as_ptr()), (8192, address));
        assert_eq!(buffer.room(8193), [0; 8193]);
        assert_eq!(buffer.len(), 16384);
    }
}
