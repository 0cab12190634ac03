//! The header of a qcow2 image: what QEMU opens with it, where its command line does not say.

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub(super) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Most of a header that is read. All that QEMU writes there takes some KiB.
const BYTES_MAX: u64 = 64 << 10;
const NAME_BYTES_MAX: usize = 1023;
/// Where extensions start in version 2, which has no length.
const LENGTH_OF_2: usize = 72;
/// Kinds of extensions: the backing file's format, and the name of the file with the data.
const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE: u32 = 0x4441_5441;
/// The feature that a file has the data.
const HAS_DATA_FILE: u64 = 4;

/// What is known from a header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// The disk's size.
    pub(super) bytes: u64,
    /// The backing file, and its format if that is named.
    pub(super) backing: Option<(String, Option<String>)>,
    pub(super) data_file: Option<String>,
}

impl Header {
    /// None if it is no such image, or can't be understood.
    pub(super) fn of(file: &Path) -> Option<Self> {
        let mut header = Vec::new();
        File::open(file).ok()?.take(BYTES_MAX).read_to_end(&mut header).ok()?;
        Self::parse(&header)
    }

    fn parse(header: &[u8]) -> Option<Self> {
        if !header.starts_with(&MAGIC) {
            return None;
        }
        let short = |at: usize| Some(u32::from_be_bytes(*header.get(at..)?.first_chunk()?));
        let long = |at: usize| Some(u64::from_be_bytes(*header.get(at..)?.first_chunk()?));
        let size = |at: usize| usize::try_from(short(at)?).ok();
        let text = |at: usize, bytes: usize| {
            let text = header.get(at..)?.get(..bytes).filter(|_| bytes <= NAME_BYTES_MAX)?;
            String::from_utf8(text.to_vec()).ok()
        };
        let (named, named_bytes) = (usize::try_from(long(8)?).ok()?, size(16)?);
        let (mut at, features) = match short(4)? {
            ..=2 => (LENGTH_OF_2, 0),
            _ => (size(100)?, long(72)?),
        };
        header.get(at..)?;
        let end = if named == 0 { usize::MAX } else { named };
        let (mut format, mut data_file) = (None, None);
        while at < end {
            let (kind, bytes) = (short(at)?, size(at + 4)?);
            match kind {
                0 => break,
                BACKING_FORMAT => format = Some(text(at + 8, bytes)?),
                DATA_FILE => data_file = Some(text(at + 8, bytes)?),
                _ => {}
            }
            at += 8 + bytes.next_multiple_of(8);
        }
        let backing = if named == 0 { None } else { Some((text(named, named_bytes)?, format)) };
        let data_file = data_file.filter(|_| features & HAS_DATA_FILE != 0);
        Some(Self { bytes: long(24)?, backing, data_file })
    }
}

/// A header of version 3, for tests.
#[cfg(test)]
pub(super) fn header(backing: &str, format: &str, data_file: &str) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..8].copy_from_slice(&[MAGIC, 3_u32.to_be_bytes()].concat());
    header[24..32].copy_from_slice(&(9_u64 << 20).to_be_bytes());
    header[79] = if data_file.is_empty() { 0 } else { 4 };
    header[100..104].copy_from_slice(&104_u32.to_be_bytes());
    let mut at = 104;
    for (kind, text) in [(BACKING_FORMAT, format), (0x6803_f857, "names"), (DATA_FILE, data_file)] {
        if !text.is_empty() {
            let bytes = u32::try_from(text.len()).unwrap();
            header[at..at + 8].copy_from_slice(&[kind, bytes].map(u32::to_be_bytes).concat());
            header[at + 8..at + 8 + text.len()].copy_from_slice(text.as_bytes());
            at += 8 + text.len().next_multiple_of(8);
        }
    }
    if !backing.is_empty() {
        let bytes = u32::try_from(backing.len()).unwrap();
        header[8..16].copy_from_slice(&300_u64.to_be_bytes());
        header[16..20].copy_from_slice(&bytes.to_be_bytes());
        header[300..300 + backing.len()].copy_from_slice(backing.as_bytes());
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_name_a_backing_file_and_a_file_with_the_data() {
        let plain = Header { bytes: 9 << 20, backing: None, data_file: None };
        assert_eq!(Header::parse(&header("", "", "")), Some(plain));
        let both = Header::parse(&header("../base", "qcow2", "data.raw")).unwrap();
        assert_eq!(both.backing, Some(("../base".to_owned(), Some("qcow2".to_owned()))));
        assert_eq!(both.data_file.as_deref(), Some("data.raw"));
        let mut old = header("base", "raw", "");
        old[7] = 2;
        old.copy_within(104..120, 72);
        old[88..136].fill(0);
        let old = Header::parse(&old).unwrap();
        assert_eq!(old.backing, Some(("base".to_owned(), Some("raw".to_owned()))));
    }

    #[test]
    fn what_is_not_understood_is_no_header() {
        let whole = header("base", "raw", "data");
        for (at, byte) in [(0, 0), (12, 1), (16, 1), (104 + 5, 1), (100, 1), (300, 0xff)] {
            let mut other = whole.clone();
            other[at] = byte;
            assert_eq!(Header::parse(&other), None, "{at}");
        }
        for length in [0, 40, 100, 200, 302] {
            assert_eq!(Header::parse(&whole[..length]), None, "{length}");
        }
    }
}
