//! Pages as a PART section of QEMU's stream.

use page::{PAGE_BYTES, PageIndex};

const PART: u8 = 0x02;
const FOOTER: u8 = 0x7e;

const ZERO: u64 = 0x02;
const PAGE: u64 = 0x08;
const END: u64 = 0x10;
const SAME_BLOCK: u64 = 0x20;

/// What stands before the first record and after the last.
const FRAME_BYTES: usize = 1 + 4 + 8 + 1 + 4;
const NAME_BYTES_MAX: usize = 1 + 255;

/// Bytes of a section with `bodies` pages of one block.
pub(crate) const fn section_bytes_max(bodies: usize) -> usize {
    FRAME_BYTES + NAME_BYTES_MAX + bodies * (8 + PAGE_BYTES)
}

/// How the stream's RAM sections look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RamSection {
    pub(crate) id: u32,
    pub(crate) footers: bool,
}

/// One PART section with pages of one block, written at the end of `out`.
pub(crate) struct Section<'o> {
    out: &'o mut Vec<u8>,
    ram: RamSection,
    name: &'o str,
    start: usize,
    is_empty: bool,
}

impl<'o> Section<'o> {
    /// `name` has at most 255 bytes: the placer checked that at its start.
    pub(crate) fn begin(out: &'o mut Vec<u8>, ram: RamSection, name: &'o str) -> Self {
        let start = out.len();
        out.push(PART);
        out.extend_from_slice(&ram.id.to_be_bytes());
        Self { out, ram, name, start, is_empty: true }
    }

    pub(crate) fn body(&mut self, page: PageIndex, bytes: &[u8]) {
        self.record(page, PAGE);
        self.out.extend_from_slice(bytes);
    }

    pub(crate) fn fill(&mut self, page: PageIndex, byte: u8) {
        self.record(page, ZERO);
        self.out.push(byte);
    }

    /// Whether another fill fits a buffer of `room` bytes.
    pub(crate) fn has_room(&self, room: usize) -> bool {
        self.out.len() + 8 + NAME_BYTES_MAX + 1 + FRAME_BYTES <= room
    }

    /// A section without records is taken back.
    pub(crate) fn end(self) {
        if self.is_empty {
            self.out.truncate(self.start);
            return;
        }
        self.out.extend_from_slice(&END.to_be_bytes());
        if self.ram.footers {
            self.out.push(FOOTER);
            self.out.extend_from_slice(&self.ram.id.to_be_bytes());
        }
    }

    fn record(&mut self, page: PageIndex, kind: u64) {
        if self.is_empty {
            self.is_empty = false;
            self.out.extend_from_slice(&(page.offset() | kind).to_be_bytes());
            let name_bytes = u8::try_from(self.name.len()).expect("the placer checked the name");
            self.out.push(name_bytes);
            self.out.extend_from_slice(self.name.as_bytes());
        } else {
            self.out.extend_from_slice(&(page.offset() | kind | SAME_BLOCK).to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_names_its_block_once() {
        let mut out = b"before".to_vec();
        let mut section = Section::begin(&mut out, RamSection { id: 3, footers: true }, "ram0");
        section.fill(PageIndex(1), 0);
        section.body(PageIndex(2), &[7; PAGE_BYTES]);
        section.end();
        let mut expected = b"before\x02\0\0\0\x03".to_vec();
        expected.extend_from_slice(b"\0\0\0\0\0\0\x10\x02\x04ram0\0");
        expected.extend_from_slice(b"\0\0\0\0\0\0\x20\x28");
        expected.extend_from_slice(&[7; PAGE_BYTES]);
        expected.extend_from_slice(b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x03");
        assert!(out == expected);
        assert!(out.len() - 6 <= section_bytes_max(2));
    }

    #[test]
    fn a_section_of_nothing_leaves_nothing() {
        let mut out = b"before".to_vec();
        Section::begin(&mut out, RamSection { id: 3, footers: false }, "ram0").end();
        assert_eq!(out, b"before");
    }
}
