//! Records what xl writes to its transport, in the form that `xen::recording` reads: all but the
//! bodies of pages, and page words as runs. So a domain of 112 MiB takes some hundred kilobytes.
//!
//! It frames the stream by itself, and knows as little of it as that takes: the recording is to
//! test what the agents know.

use std::fs::{self, File};
use std::io::{self, Write};

const MAGIC: &[u8] = b"xl stream 1\n";
const BYTES: u8 = 1;
const PAGES: u8 = 2;
/// A recording that grows beyond this is of something else.
const FILE_BYTES_MAX: usize = 8 << 20;

/// Types of records.
const LIBXL_END: u32 = 0;
const LIBXC_CONTEXT: u32 = 1;
const LIBXC_END: u32 = 0;
const PAGE_DATA: u32 = 1;
/// Bytes of a record's type and length, and of PAGE_DATA's count of pages with what follows it.
const RECORD_HEAD: usize = 8;
const PAGE_DATA_HEAD: usize = 8;
const WORD: usize = 8;

/// A header that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Xl,
    Libxl,
    LibxlRecord,
    Libxc,
    LibxcRecord,
    /// The head of PAGE_DATA, of which the type and the length are read already.
    PageData,
}

impl Part {
    fn bytes(self) -> usize {
        match self {
            Self::Xl => 48,
            Self::Libxl => 16,
            Self::LibxlRecord | Self::LibxcRecord => RECORD_HEAD,
            Self::Libxc => 40,
            Self::PageData => RECORD_HEAD + PAGE_DATA_HEAD,
        }
    }
}

/// The position in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In a header, or in the words of a PAGE_DATA record.
    Before(Part),
    Passing {
        left: u64,
        then: Part,
    },
    Words {
        left: u32,
    },
    /// In bodies, which are not recorded.
    Bodies {
        left: u64,
    },
    /// After the stream: xl's permission.
    After,
}

/// Writes one recording.
pub(crate) struct Recorder {
    file: File,
    written: usize,
    place: Place,
    /// What was read of a header, or of a word.
    head: Vec<u8>,
    /// Of the current PAGE_DATA record.
    page_data: Vec<u8>,
    runs: Vec<(u64, u32)>,
    /// Bytes that are not written yet.
    plain: Vec<u8>,
}

impl Recorder {
    pub(crate) fn create(path: &str) -> io::Result<Self> {
        let mut file = File::create(path)?;
        file.write_all(MAGIC)?;
        Ok(Self {
            file,
            written: MAGIC.len(),
            place: Place::Before(Part::Xl),
            head: Vec::new(),
            page_data: Vec::new(),
            runs: Vec::new(),
            plain: Vec::new(),
        })
    }

    /// Takes what xl has written next. It is in the file when this returns.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.place {
                Place::Before(part) => {
                    if self.fill_head(part.bytes(), &mut bytes) {
                        self.header(part)?;
                    }
                }
                Place::Passing { left, then } => {
                    let (these, left) = split(&mut bytes, left);
                    self.plain.extend_from_slice(these);
                    self.place = Place::passing(left, then);
                }
                Place::Words { .. } => {
                    if self.fill_head(WORD, &mut bytes) {
                        self.word()?;
                    }
                }
                Place::Bodies { left } => {
                    let (_, left) = split(&mut bytes, left);
                    self.place = Place::bodies(left);
                }
                Place::After => {
                    self.plain.extend_from_slice(bytes);
                    bytes = &[];
                }
            }
        }
        self.write_plain()
    }

    /// Completes a header. False if more of it has to come.
    fn fill_head(&mut self, bytes_needed: usize, bytes: &mut &[u8]) -> bool {
        let missing = bytes_needed.saturating_sub(self.head.len());
        let (these, _) = split(bytes, missing as u64);
        self.head.extend_from_slice(these);
        self.head.len() >= bytes_needed
    }

    /// Takes a complete header.
    fn header(&mut self, part: Part) -> io::Result<()> {
        let (kind, length) = (number(&self.head, 0), number(&self.head, 4));
        if part == Part::LibxcRecord && kind == PAGE_DATA {
            self.place = Place::Before(Part::PageData);
            return Ok(());
        }
        let head = std::mem::take(&mut self.head);
        if part == Part::PageData {
            return self.page_data(&head);
        }
        self.plain.extend_from_slice(&head);
        let padded = u64::from(length).next_multiple_of(8);
        self.place = match part {
            // The length of the configuration is its last number.
            Part::Xl => Place::passing(u64::from(number(&head, 44)), Part::Libxl),
            Part::Libxl => Place::Before(Part::LibxlRecord),
            Part::LibxlRecord if kind == LIBXC_CONTEXT => Place::Before(Part::Libxc),
            Part::LibxlRecord if kind == LIBXL_END => Place::After,
            Part::LibxlRecord => Place::passing(padded, Part::LibxlRecord),
            Part::LibxcRecord if kind == LIBXC_END => Place::Before(Part::LibxlRecord),
            Part::Libxc | Part::PageData => Place::Before(Part::LibxcRecord),
            Part::LibxcRecord => Place::passing(padded, Part::LibxcRecord),
        };
        Ok(())
    }

    fn page_data(&mut self, head: &[u8]) -> io::Result<()> {
        let (length, count) = (number(head, 4), number(head, 8));
        let table_bytes = PAGE_DATA_HEAD as u64 + u64::from(count) * WORD as u64;
        if count == 0 || table_bytes > u64::from(length) {
            let text = format!("PAGE_DATA of {length} bytes with {count} pages");
            return Err(io::Error::other(text));
        }
        self.page_data = head.to_vec();
        self.runs.clear();
        self.place = Place::Words { left: count };
        Ok(())
    }

    /// Takes a page word.
    fn word(&mut self) -> io::Result<()> {
        let word = u64::from(number(&self.head, 0)) | u64::from(number(&self.head, 4)) << 32;
        self.head.clear();
        match self.runs.last_mut() {
            Some((first, count)) if first.checked_add((*count).into()) == Some(word) => *count += 1,
            _ => self.runs.push((word, 1)),
        }
        let Place::Words { left } = self.place else { return Ok(()) };
        self.place = Place::Words { left: left - 1 };
        if left > 1 {
            return Ok(());
        }
        let (length, count) = (number(&self.page_data, 4), number(&self.page_data, 8));
        let table_bytes = PAGE_DATA_HEAD as u64 + u64::from(count) * WORD as u64;
        self.place = Place::bodies(u64::from(length) - table_bytes);
        self.write_plain()?;
        let mut item = vec![PAGES];
        item.extend_from_slice(&self.page_data);
        item.extend_from_slice(&length_of(self.runs.len())?);
        for (first, count) in &self.runs {
            item.extend_from_slice(&first.to_le_bytes());
            item.extend_from_slice(&count.to_le_bytes());
        }
        self.write(&item)
    }

    fn write_plain(&mut self) -> io::Result<()> {
        if self.plain.is_empty() {
            return Ok(());
        }
        let plain = std::mem::take(&mut self.plain);
        let head = [&[BYTES][..], &length_of(plain.len())?].concat();
        self.write(&head)?;
        self.write(&plain)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        if self.written > FILE_BYTES_MAX {
            return Err(io::Error::other("the recording has grown too large"));
        }
        self.file.write_all(bytes)
    }
}

impl Place {
    fn passing(left: u64, then: Part) -> Self {
        if left == 0 { Self::Before(then) } else { Self::Passing { left, then } }
    }

    fn bodies(left: u64) -> Self {
        if left == 0 { Self::Before(Part::LibxcRecord) } else { Self::Bodies { left } }
    }
}

/// Takes as many of the bytes as are `left`, and returns how many are left then.
fn split<'b>(bytes: &mut &'b [u8], left: u64) -> (&'b [u8], u64) {
    let all = *bytes;
    let count = usize::try_from(left).map_or(all.len(), |left| left.min(all.len()));
    let (these, rest) = all.split_at(count);
    *bytes = rest;
    (these, left - count as u64)
}

fn length_of(items: usize) -> io::Result<[u8; 4]> {
    u32::try_from(items).map(u32::to_le_bytes).map_err(io::Error::other)
}

/// A number of four bytes, the lowest first.
fn number(head: &[u8], at: usize) -> u32 {
    let bytes = head.get(at..).and_then(|bytes| bytes.first_chunk::<4>());
    bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// Prints a file as digits, for the lab, which reads text.
pub(crate) fn print(path: &str) -> io::Result<()> {
    let mut text = String::new();
    for byte in fs::read(path)? {
        text += &format!("{byte:02x}");
    }
    io::stdout().write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use page::PageIndex;
    use seeds::recording::Recording;
    use xen::handshake::PERMISSION;
    use xen::{DomainKind, PageKind, PageWord, libxc, write};

    use super::*;

    /// Pages from `from` on, of which each third is of another type, and all repeat their numbers.
    fn pages(from: u32, count: u32) -> Vec<(PageWord, u8)> {
        let kinds = [PageKind::Normal, PageKind::Normal, PageKind::Invalid];
        let word = |page: u32| PageWord { page: PageIndex(page), kind: kinds[page as usize % 3] };
        (from..from + count).map(|page| (word(page), page.to_le_bytes()[0])).collect()
    }

    #[test]
    fn a_stream_is_read_back_as_it_was_however_it_came() {
        let mut stream = Vec::new();
        write::begin(&mut stream, DomainKind::Pv);
        for (from, count) in [(0, 100), (100, 50), (7, 3)] {
            write::page_data(&mut stream, &pages(from, count));
        }
        write::record(&mut stream, libxc::VERIFY, &[]);
        write::page_data(&mut stream, &pages(0, 10));
        write::end(&mut stream, DomainKind::Pv);
        stream.extend_from_slice(PERMISSION);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pv.xl").display().to_string();
        for piece_bytes in [1, 7, 4096, stream.len()] {
            let mut recorder = Recorder::create(&path).unwrap();
            stream.chunks(piece_bytes).for_each(|piece| recorder.push(piece).unwrap());
            let recorded = fs::read(&path).unwrap();
            let recording = Recording::parse(&recorded).unwrap();
            recording.check();
            let mut read = Vec::new();
            recording.each(|piece| read.extend_from_slice(piece));
            assert!(read == stream, "in pieces of {piece_bytes} bytes");
        }
        // In one piece, the pages take next to nothing.
        let bytes = fs::metadata(&path).unwrap().len();
        assert!(bytes < stream.len() as u64 / 8, "{bytes} of {}", stream.len());
    }

    #[test]
    fn what_is_no_record_of_pages_ends_the_migration() {
        let mut stream = Vec::new();
        write::begin(&mut stream, DomainKind::Hvm);
        stream.extend_from_slice(&[PAGE_DATA, 16, 2, 0].map(u32::to_le_bytes).concat());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hvm.xl").display().to_string();
        let mut recorder = Recorder::create(&path).unwrap();
        let error = recorder.push(&stream).unwrap_err();
        assert_eq!(error.to_string(), "PAGE_DATA of 16 bytes with 2 pages");
    }
}
