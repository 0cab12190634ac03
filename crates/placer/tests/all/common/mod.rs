//! The QEMU of the placer's tests.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};

use page::PAGE_BYTES;

/// A page that no fill equals, and that differs from other seeds' everywhere.
pub(crate) fn body(seed: u8) -> Vec<u8> {
    (0..PAGE_BYTES).map(|at| at.to_le_bytes()[0].wrapping_mul(3).wrapping_add(seed) | 1).collect()
}

/// The QEMU that loads the stream: it keeps what it read.
pub(crate) struct QemuEnd {
    ours: UnixStream,
    reading: JoinHandle<Vec<u8>>,
}

impl QemuEnd {
    pub(crate) fn start() -> Self {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let reading = thread::spawn(move || {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).unwrap();
            all
        });
        Self { ours, reading }
    }

    pub(crate) fn socket(&self) -> UnixStream {
        self.ours.try_clone().unwrap()
    }

    /// Everything it read, after the feeder finished.
    pub(crate) fn end(self) -> Vec<u8> {
        self.reading.join().unwrap()
    }
}

/// One record of a RAM section.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) block: String,
    pub(crate) page: usize,
    pub(crate) bytes: Vec<u8>,
}

/// A stream, parsed in the plainest way.
pub(crate) struct Fed {
    pub(crate) records: Vec<Record>,
    pub(crate) sections: usize,
}

impl Fed {
    pub(crate) fn parse(bytes: &[u8], head: &[u8], tail: &[u8], id: u32, footers: bool) -> Self {
        let mut left = bytes.strip_prefix(head).expect("the head comes first");
        left = left.strip_suffix(tail).expect("the tail comes last");
        let (mut records, mut sections) = (Vec::new(), 0);
        while !left.is_empty() {
            assert_eq!(take::<1>(&mut left), [2], "a PART section");
            assert_eq!(take::<4>(&mut left), id.to_be_bytes());
            let mut block = None;
            loop {
                let word = u64::from_be_bytes(take(&mut left));
                let (offset, flags) = (word & !0xfff, word & 0xfff);
                if flags == 0x10 {
                    break;
                }
                if flags & 0x20 == 0 {
                    let [length] = take(&mut left);
                    let (name, rest) = left.split_at(usize::from(length));
                    block = Some(String::from_utf8(name.to_vec()).unwrap());
                    left = rest;
                }
                let bytes = match flags & !0x20 {
                    0x02 => vec![take::<1>(&mut left)[0]; PAGE_BYTES],
                    0x08 => take::<PAGE_BYTES>(&mut left).to_vec(),
                    other => panic!("flags {other:#x}"),
                };
                let page = usize::try_from(offset).unwrap() / PAGE_BYTES;
                let block = block.clone().expect("a section names its block");
                records.push(Record { block, page, bytes });
            }
            if footers {
                assert_eq!(take::<1>(&mut left), [0x7e]);
                assert_eq!(take::<4>(&mut left), id.to_be_bytes());
            }
            sections += 1;
        }
        Self { records, sections }
    }
}

fn take<const N: usize>(left: &mut &[u8]) -> [u8; N] {
    let (taken, rest) = left.split_first_chunk().expect("a record is whole");
    *left = rest;
    *taken
}

/// The pages of `block` after QEMU loaded the records.
pub(crate) fn content_after(records: &[Record], block: &str, before: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut pages = before.to_vec();
    for record in records.iter().filter(|record| record.block == block) {
        pages[record.page].clone_from(&record.bytes);
    }
    pages
}
