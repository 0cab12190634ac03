//! The source that pages are read from.

use std::ops::Range;

use crate::{Buffer, Failure};

/// An image that can be read, by several threads at once.
///
/// A read blocks its thread. One that is never answered (a request on storage
/// that is gone stays in the kernel, and can't be taken back) keeps its thread
/// and that thread's buffer, and nothing else.
pub trait Source: Send + Sync + 'static {
    /// The image's size.
    fn bytes(&self) -> u64;

    /// Reads into the buffer, which has room for `bytes` and twice
    /// [`crate::ALIGNMENT_MAX`]. Returns where in the buffer they are: fewer
    /// if the image ends.
    ///
    /// # Errors
    /// If the storage fails. After [`Failure::Broken`] nothing more is read.
    fn read(&self, offset: u64, bytes: usize, buffer: &mut Buffer)
    -> Result<Range<usize>, Failure>;

    /// How many bytes the storage has to read for such a read.
    fn span_bytes(&self, _offset: u64, bytes: usize) -> usize {
        bytes
    }

    /// Makes reads in flight end with an error if they can, and later ones, too.
    /// Doesn't wait.
    fn interrupt(&self);
}
