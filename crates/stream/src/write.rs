//! Writes main streams: the sections for pages that the destination can't write
//! into QEMU's memory, and whole streams for tests.

use page::{PAGE_BYTES, PageIndex};

use crate::Block;
use crate::record::{MAGIC, RAM, VERSION, command, flag, kind};

/// The name does not fit the stream's one-byte length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the RAM block name {name:?} is longer than 255 bytes")]
pub struct NameTooLong {
    /// The name.
    pub name: String,
}

/// One section of classic RAM records, appended to a buffer.
///
/// Each section names its first block, so that sections of any origin can
/// follow each other. The section is invalid before [`PartSection::finish`]. A page
/// that is refused, with [`NameTooLong`], leaves nothing in it.
#[derive(Debug)]
#[must_use = "a section that isn't finished can't be loaded"]
pub struct PartSection<'a> {
    out: &'a mut Vec<u8>,
    section: u32,
    footers: bool,
    /// Range of the current block's name in `out`, for comparing; a copy would
    /// cost an allocation per section.
    block: Option<(usize, usize)>,
}

impl<'a> PartSection<'a> {
    /// Starts a PART section with the number `section`.
    pub fn begin(out: &'a mut Vec<u8>, section: u32, footers: bool) -> Self {
        Self::header(out, kind::PART, section, footers)
    }

    /// Starts the END section, RAM's last.
    pub fn begin_end(out: &'a mut Vec<u8>, section: u32, footers: bool) -> Self {
        Self::header(out, kind::END, section, footers)
    }

    fn header(out: &'a mut Vec<u8>, kind: u8, section: u32, footers: bool) -> Self {
        out.push(kind);
        out.extend_from_slice(&section.to_be_bytes());
        Self { out, section, footers, block: None }
    }

    /// Adds a page with its body.
    pub fn body(
        &mut self,
        block: &str,
        page: PageIndex,
        bytes: &[u8; PAGE_BYTES],
    ) -> Result<(), NameTooLong> {
        self.word(block, page, flag::PAGE)?;
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    /// Adds a page that is `byte` throughout.
    pub fn fill(&mut self, block: &str, page: PageIndex, byte: u8) -> Result<(), NameTooLong> {
        self.word(block, page, flag::ZERO)?;
        self.out.push(byte);
        Ok(())
    }

    /// Adds a page as the encoded difference to its previous version (XBZRLE).
    pub fn difference(
        &mut self,
        block: &str,
        page: PageIndex,
        encoded: &[u8],
    ) -> Result<(), NameTooLong> {
        self.word(block, page, flag::XBZRLE)?;
        self.out.push(1);
        let length = u16::try_from(encoded.len()).unwrap_or(u16::MAX);
        self.out.extend_from_slice(&length.to_be_bytes());
        self.out.extend_from_slice(encoded);
        Ok(())
    }

    /// Adds a page that QEMU has compressed (capability `compress`, up to 9.0).
    pub fn compressed(
        &mut self,
        block: &str,
        page: PageIndex,
        encoded: &[u8],
    ) -> Result<(), NameTooLong> {
        self.word(block, page, flag::COMPRESS_PAGE)?;
        let length = u32::try_from(encoded.len()).unwrap_or(u32::MAX);
        self.out.extend_from_slice(&length.to_be_bytes());
        self.out.extend_from_slice(encoded);
        Ok(())
    }

    /// Adds a MULTIFD_FLUSH mark, as QEMU 8.1 and newer do in multifd streams.
    pub fn multifd_flush(&mut self) {
        self.out.extend_from_slice(&flag::MULTIFD_FLUSH.to_be_bytes());
    }

    /// Ends the section, with a footer if the stream has footers.
    pub fn finish(self) {
        end_of_section(self.out, self.section, self.footers);
    }

    fn word(&mut self, block: &str, page: PageIndex, flags: u64) -> Result<(), NameTooLong> {
        let same = self.block.is_some_and(|(from, to)| self.out[from..to] == *block.as_bytes());
        if same {
            let word = page.offset() | flags | flag::CONTINUE;
            self.out.extend_from_slice(&word.to_be_bytes());
            return Ok(());
        }
        let Ok(length) = u8::try_from(block.len()) else {
            return Err(NameTooLong { name: block.to_owned() });
        };
        self.out.extend_from_slice(&(page.offset() | flags).to_be_bytes());
        self.out.push(length);
        let from = self.out.len();
        self.out.extend_from_slice(block.as_bytes());
        self.block = Some((from, self.out.len()));
        Ok(())
    }
}

fn end_of_section(out: &mut Vec<u8>, section: u32, footers: bool) {
    out.extend_from_slice(&flag::EOS.to_be_bytes());
    if footers {
        out.push(kind::FOOTER);
        out.extend_from_slice(&section.to_be_bytes());
    }
}

/// Appends the stream's first bytes, and the configuration record unless the
/// machine type predates QEMU 2.4.
pub fn header(out: &mut Vec<u8>, machine: Option<&str>) {
    out.extend_from_slice(&MAGIC.to_be_bytes());
    out.extend_from_slice(&VERSION.to_be_bytes());
    if let Some(machine) = machine {
        out.push(kind::CONFIGURATION);
        let length = u32::try_from(machine.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(machine.as_bytes());
    }
}

/// Appends the configuration's list of capabilities that both ends must have.
pub fn capabilities(out: &mut Vec<u8>, names: &[&str]) {
    const NAME: &[u8] = b"configuration/capabilities";
    out.push(kind::SUBSECTION);
    out.push(length_byte(NAME.len()));
    out.extend_from_slice(NAME);
    out.extend_from_slice(&1u32.to_be_bytes());
    let count = u32::try_from(names.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&count.to_be_bytes());
    for name in names {
        out.push(length_byte(name.len()));
        out.extend_from_slice(name.as_bytes());
    }
}

/// Appends the command OPEN_RETURN_PATH, which precedes setup if the source
/// listens to the destination's answers.
pub fn open_return_path(out: &mut Vec<u8>) {
    command(out, command::OPEN_RETURN_PATH, &[]);
}

/// Appends the command SWITCHOVER_START, which is between the last two RAM
/// sections.
pub fn switchover_start(out: &mut Vec<u8>) {
    command(out, command::SWITCHOVER_START, &[]);
}

/// Appends the command POSTCOPY_ADVISE: the migration may switch to postcopy.
pub fn postcopy_advise(out: &mut Vec<u8>) {
    let page_sizes = [0x1000_u64.to_be_bytes(); 2].concat();
    command(out, command::POSTCOPY_ADVISE, &page_sizes);
}

/// Appends the same command as QEMU sends it with the capability `dirty-bitmaps` alone: only
/// dirty bitmaps may be sent late.
pub fn bitmaps_advise(out: &mut Vec<u8>) {
    command(out, command::POSTCOPY_ADVISE, &[]);
}

/// Appends the command RECV_BITMAP, which asks what the destination has of a block: the first
/// commands by which a source resumes postcopy.
pub fn recv_bitmap(out: &mut Vec<u8>, block: &str) {
    let mut bytes = vec![length_byte(block.len())];
    bytes.extend_from_slice(block.as_bytes());
    command(out, command::RECV_BITMAP, &bytes);
}

/// Appends the command POSTCOPY_RAM_DISCARD for one page: the migration
/// switches to postcopy.
pub fn postcopy_discard(out: &mut Vec<u8>, block: &str, page: PageIndex) {
    let mut bytes = vec![0, length_byte(block.len())];
    bytes.extend_from_slice(block.as_bytes());
    bytes.push(0);
    bytes.extend_from_slice(&page.offset().to_be_bytes());
    bytes.extend_from_slice(&(PAGE_BYTES as u64).to_be_bytes());
    command(out, command::POSTCOPY_RAM_DISCARD, &bytes);
}

/// Appends a PING command, which precedes setup in real streams.
pub fn ping(out: &mut Vec<u8>, value: u32) {
    command(out, command::PING, &value.to_be_bytes());
}

fn command(out: &mut Vec<u8>, command: u16, bytes: &[u8]) {
    out.push(kind::COMMAND);
    out.extend_from_slice(&command.to_be_bytes());
    out.extend_from_slice(&u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_be_bytes());
    out.extend_from_slice(bytes);
}

/// Appends the header of a START (`full` false) or FULL section.
pub fn section_header(out: &mut Vec<u8>, full: bool, section: u32, name: &str, version: u32) {
    out.push(if full { kind::FULL } else { kind::START });
    out.extend_from_slice(&section.to_be_bytes());
    out.push(length_byte(name.len()));
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&0u32.to_be_bytes());
    out.extend_from_slice(&version.to_be_bytes());
}

/// Appends the RAM's START section with its block list.
///
/// `multifd_flush` adds the mark that QEMU 8.1 and newer write in the setup of
/// a multifd stream.
pub fn ram_setup(
    out: &mut Vec<u8>,
    section: u32,
    blocks: &[Block],
    footers: bool,
    multifd_flush: bool,
) {
    section_header(out, false, section, "ram", 4);
    debug_assert_eq!(RAM, b"ram");
    let total: u64 = blocks.iter().map(|block| block.bytes).sum();
    out.extend_from_slice(&(total | flag::MEM_SIZE).to_be_bytes());
    for block in blocks {
        out.push(length_byte(block.name.len()));
        out.extend_from_slice(block.name.as_bytes());
        out.extend_from_slice(&block.bytes.to_be_bytes());
    }
    if multifd_flush {
        out.extend_from_slice(&flag::MULTIFD_FLUSH.to_be_bytes());
    }
    end_of_section(out, section, footers);
}

/// A name's length in one byte; a longer name is caught by the reader of the
/// test's stream.
fn length_byte(length: usize) -> u8 {
    u8::try_from(length).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_section_names_its_block_once() {
        let mut out = Vec::new();
        let mut part = PartSection::begin(&mut out, 2, true);
        part.fill("pc.ram", PageIndex(3), 0).unwrap();
        part.fill("pc.ram", PageIndex(4), 9).unwrap();
        part.fill("vga", PageIndex(0), 0).unwrap();
        part.finish();
        let mut expected = vec![2, 0, 0, 0, 2];
        expected.extend_from_slice(&0x3002u64.to_be_bytes());
        expected.extend_from_slice(b"\x06pc.ram\x00");
        expected.extend_from_slice(&0x4022u64.to_be_bytes());
        expected.push(9);
        expected.extend_from_slice(&0x0002u64.to_be_bytes());
        expected.extend_from_slice(b"\x03vga\x00");
        expected.extend_from_slice(&0x10u64.to_be_bytes());
        expected.extend_from_slice(&[0x7e, 0, 0, 0, 2]);
        assert_eq!(out, expected);
    }

    #[test]
    fn too_long_a_name_writes_nothing() {
        let mut out = Vec::new();
        let mut part = PartSection::begin(&mut out, 2, false);
        let name = "x".repeat(256);
        assert!(part.fill(&name, PageIndex(0), 0).is_err());
        part.body("a", PageIndex(0), &[7; PAGE_BYTES]).unwrap();
        part.finish();
        assert_eq!(out.len(), 5 + 8 + 2 + PAGE_BYTES + 8);
    }
}
