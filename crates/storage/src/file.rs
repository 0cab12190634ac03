//! A raw image: a file or a block device of this host.
//!
//! It is read past the host's page cache (O_DIRECT), which would keep blocks from
//! before the guest wrote them at the other host, and would fill with blocks that are
//! not read again. On a file system without O_DIRECT the cache is used, and each range
//! is dropped from it before and after.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, AtFlags, OFlags, StatxFlags, fadvise, ioctl_blksszget, statx};
use rustix::io::{Errno, pread};

use crate::{ALIGNMENT_MAX, Buffer, Failure, OpenError, Source};

/// The alignment for files whose system doesn't report one.
const ALIGNMENT: usize = 4096;

/// A part of a file or a device, from which pages are read.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    /// Where the image starts.
    base: u64,
    bytes: u64,
    /// The alignment of offsets and lengths; `None`: read through the cache.
    direct: Option<usize>,
}

impl FileSource {
    /// Opens an image that starts at byte `base` of the file and has `bytes`, or
    /// the rest of the file.
    ///
    /// This may hang on storage that is missing: see [`crate::open`].
    ///
    /// # Errors
    /// If it can't be opened and read, or is neither a file nor a block device.
    pub fn open(path: &Path, base: u64, bytes: Option<u64>) -> Result<Self, OpenError> {
        Self::opened(path, base, bytes, OFlags::DIRECT).map_err(|error| OpenError::Image {
            what: path.display().to_string(),
            reason: error.to_string(),
        })
    }

    fn opened(path: &Path, base: u64, bytes: Option<u64>, how: OFlags) -> io::Result<Self> {
        // Opening a FIFO would otherwise wait for a writer.
        let flags = |how: OFlags| i32::try_from((how | OFlags::NONBLOCK).bits()).unwrap_or(0);
        let open = |how| OpenOptions::new().read(true).custom_flags(flags(how)).open(path);
        let (mut file, how) = match open(how) {
            Err(error) if how == OFlags::DIRECT && refuses_direct(&error) => {
                (open(OFlags::empty())?, OFlags::empty())
            }
            opened => (opened?, how),
        };
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::other("it is neither a file nor a block device"));
        }
        let end = file.seek(SeekFrom::End(0))?;
        let room = end.checked_sub(base).ok_or_else(|| io::Error::other("it is too short"))?;
        let direct = if how == OFlags::DIRECT { alignment(&file) } else { None };
        let source = Self { file, base, bytes: bytes.map_or(room, |n| n.min(room)), direct };
        if how != OFlags::DIRECT {
            // No readahead: the wanted pages are known.
            fadvise(&source.file, 0, None, Advice::Random)?;
        }
        match source.probe() {
            // Some file systems accept O_DIRECT and then refuse such reads.
            Err(error) if how == OFlags::DIRECT && refuses_direct(&error) => {
                Self::opened(path, base, bytes, OFlags::empty())
            }
            Ok(()) if how == OFlags::DIRECT && direct.is_none() => {
                Self::opened(path, base, bytes, OFlags::empty())
            }
            probed => probed.map(|()| source),
        }
    }

    /// Whether it is read past the host's page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    fn probe(&self) -> io::Result<()> {
        let mut buffer = Buffer::new(ALIGNMENT_MAX);
        let bytes = self.direct.unwrap_or(1);
        self.pread(0, buffer.as_mut().get_mut(..bytes).unwrap_or_default()).map(drop)
    }

    /// The range that is read for this one, aligned as the device requires.
    fn span(&self, offset: u64, bytes: usize) -> Range<u64> {
        let from = self.base + offset;
        let end = from + bytes as u64;
        let alignment = self.direct.unwrap_or(1) as u64;
        from - from % alignment..end.next_multiple_of(alignment)
    }

    /// Reads until the buffer is full or the file ends.
    fn pread(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut read = 0;
        while let Some(rest) = buffer.get_mut(read..)
            && !rest.is_empty()
        {
            match pread(&self.file, rest, offset + read as u64) {
                Ok(0) => break,
                Ok(now) => read += now,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            // After the end, the next offset would not be aligned.
            if self.direct.is_some_and(|alignment| read % alignment != 0) {
                break;
            }
        }
        Ok(read)
    }

    fn drop_cache(&self, span: &Range<u64>) {
        if self.direct.is_none() {
            // If this fails, an old block is still noticed by its hash.
            let bytes = NonZeroU64::new(span.end - span.start);
            let _ = fadvise(&self.file, span.start, bytes, Advice::DontNeed);
        }
    }
}

impl Source for FileSource {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(
        &self,
        offset: u64,
        bytes: usize,
        buffer: &mut Buffer,
    ) -> Result<Range<usize>, Failure> {
        let refused = |reason: String| Failure::Refused { offset, bytes, reason };
        let span = self.span(offset, bytes);
        let head = usize::try_from(self.base + offset - span.start).unwrap_or(usize::MAX);
        let room = usize::try_from(span.end - span.start)
            .ok()
            .and_then(|bytes| buffer.as_mut().get_mut(..bytes))
            .ok_or_else(|| refused("that is too much for one request".to_owned()))?;
        self.drop_cache(&span);
        let read = self.pread(span.start, room).map_err(|error| refused(error.to_string()))?;
        self.drop_cache(&span);
        Ok(head.min(read)..read.min(head + bytes))
    }

    fn span_bytes(&self, offset: u64, bytes: usize) -> usize {
        let span = self.span(offset, bytes);
        usize::try_from(span.end - span.start).unwrap_or(usize::MAX)
    }

    /// Nothing interrupts a read that is in the kernel.
    fn interrupt(&self) {}
}

fn refuses_direct(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno == Some(Errno::INVAL) || errno == Some(Errno::OPNOTSUPP)
}

/// The alignment of direct reads of this file; `None` if there are none, or the
/// alignment is too large.
fn alignment(file: &File) -> Option<usize> {
    let stat = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    let told = stat.filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    let alignment = match told {
        Some(stat) if stat.stx_dio_offset_align == 0 => return None,
        Some(stat) => stat.stx_dio_offset_align.max(stat.stx_dio_mem_align) as usize,
        None => ioctl_blksszget(file).map_or(ALIGNMENT, |bytes| bytes as usize),
    };
    (alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX).then_some(alignment)
}

#[cfg(test)]
mod tests;
