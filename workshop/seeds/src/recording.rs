//! Streams of real domains, recorded without the contents of their pages. `xen-kit record` of the
//! lab writes them:
//!
//! ```text
//! "xl stream 1\n"
//! 1, bytes u32, bytes                          as xl wrote them
//! 2, head [16], runs u32, { word u64, count u32 } x runs
//!                                              a PAGE_DATA record: what precedes its page words,
//!                                              and runs of words, each one more than the last
//! ```
//!
//! All numbers are little-endian. Each body is read as a page that repeats one byte: the lowest of
//! its number.

use std::ops::ControlFlow;

use page::{Epoch, PAGE_BYTES};
use xen::handshake::PERMISSION;
use xen::{
    Configuration, Joined, Joiner, PageWord, Record, Sink, Splitter, Step, XL_HEADER_BYTES,
    configuration_bytes, libxc,
};

const MAGIC: &[u8] = b"xl stream 1\n";
const BYTES: u8 = 1;
const PAGES: u8 = 2;
/// A record's type and length, then the number of its pages, then their words.
const RECORD_HEAD_BYTES: usize = 8;
const PAGE_DATA_HEAD_BYTES: usize = 8;
const WORD_BYTES: usize = 8;
const HEAD_BYTES: usize = RECORD_HEAD_BYTES + PAGE_DATA_HEAD_BYTES;
/// Most pages of a recording, over all passes: 128 MiB of words.
const PAGES_MAX: u64 = 1 << 24;

/// A recorded stream.
#[derive(Debug)]
pub struct Recording(Vec<Item>);

#[derive(Debug)]
enum Item {
    Bytes(Vec<u8>),
    Pages { head: [u8; HEAD_BYTES], words: Vec<u64> },
}

/// The byte that a page's body repeats; none if it has no body.
fn content(word: u64) -> Option<u8> {
    // The types 13 to 15 have none.
    (word >> 60 < 13).then(|| word.to_le_bytes()[0])
}

impl Recording {
    /// Reads one.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(recorded: &[u8]) -> Result<Self, &'static str> {
        let mut rest = recorded.strip_prefix(MAGIC).ok_or("it is no recording")?;
        let (mut items, mut pages) = (Vec::new(), 0);
        while let Some((kind, after)) = rest.split_first() {
            rest = after;
            items.push(match *kind {
                BYTES => {
                    let bytes = u32::from_le_bytes(take(&mut rest)?) as usize;
                    let (bytes, after) = rest.split_at_checked(bytes).ok_or("it is cut short")?;
                    rest = after;
                    Item::Bytes(bytes.to_vec())
                }
                PAGES => {
                    let head = take(&mut rest)?;
                    let runs = u32::from_le_bytes(take(&mut rest)?);
                    let mut words = Vec::new();
                    for _ in 0..runs {
                        let first = u64::from_le_bytes(take(&mut rest)?);
                        let count = u64::from(u32::from_le_bytes(take(&mut rest)?));
                        pages += count;
                        let end = first.checked_add(count).filter(|_| pages <= PAGES_MAX);
                        words.extend(first..end.ok_or("it has too many pages")?);
                    }
                    Item::Pages { head, words }
                }
                _ => return Err("it has an unknown part"),
            });
        }
        Ok(Self(items))
    }

    /// Passes the stream on, in pieces.
    pub fn each(&self, mut pass: impl FnMut(&[u8])) {
        for item in &self.0 {
            match item {
                Item::Bytes(bytes) => pass(bytes),
                Item::Pages { head, words } => {
                    pass(head);
                    words.iter().for_each(|word| pass(&word.to_le_bytes()));
                    let bodies = words.iter().filter_map(|word| content(*word));
                    bodies.for_each(|byte| pass(&[byte; PAGE_BYTES]));
                }
            }
        }
    }

    /// The same stream with the first page only of so many records of pages, and without the other
    /// records of pages: for fuzzing.
    #[must_use]
    pub fn shortened(&self, records: usize) -> Vec<u8> {
        let (mut out, mut left) = (Vec::new(), records);
        for item in &self.0 {
            match item {
                Item::Bytes(bytes) => out.extend_from_slice(bytes),
                Item::Pages { words, .. } if left > 0 => {
                    let Some(word) = words.first() else { continue };
                    left -= 1;
                    let body = content(*word).map(|byte| [byte; PAGE_BYTES]);
                    let body = body.as_ref().map_or(&[][..], |body| &body[..]);
                    let length = PAGE_DATA_HEAD_BYTES + WORD_BYTES + body.len();
                    let length = u32::try_from(length).unwrap_or(u32::MAX);
                    for number in [libxc::PAGE_DATA, length, 1, 0] {
                        out.extend_from_slice(&number.to_le_bytes());
                    }
                    out.extend_from_slice(&word.to_le_bytes());
                    out.extend_from_slice(body);
                }
                Item::Pages { .. } => {}
            }
        }
        out
    }

    /// Asserts that the stream is understood as a whole: it is split into what was recorded, its
    /// pages can be joined, and what follows it is xl's permission, if anything.
    ///
    /// # Panics
    /// If it is not.
    pub fn check(&self) {
        let mut splitter = Splitter::default();
        let (mut pending, mut taken, mut ended) = (Vec::new(), Taken::default(), false);
        self.each(|piece| {
            pending.extend_from_slice(piece);
            while !ended {
                let progress = splitter.push(&pending, &mut taken).expect("a stream of xl");
                pending.drain(..progress.consumed);
                ended = progress.step == Step::Ended;
                if matches!(progress.step, Step::More { .. }) {
                    break;
                }
            }
        });
        assert!(ended, "it is not complete: {:?}", splitter.finish());
        assert!(pending.is_empty() || pending == PERMISSION, "{} bytes follow it", pending.len());
        let words = self.0.iter().flat_map(|item| match item {
            Item::Bytes(_) => &[][..],
            Item::Pages { words, .. } => &words[..],
        });
        assert!(words.eq(&taken.words), "it has other pages");
        assert!(!taken.words.is_empty(), "it has no page");
        let mut non_ram: Vec<u8> = Vec::new();
        for item in &self.0 {
            if let Item::Bytes(bytes) = item {
                non_ram.extend_from_slice(bytes);
            }
        }
        assert_eq!(non_ram, [&taken.non_ram[..], &pending[..]].concat(), "the rest is another");
        let (header, rest) = non_ram.split_first_chunk::<XL_HEADER_BYTES>().expect("a header");
        let bytes = configuration_bytes(header).expect("xl's header");
        let configuration = Configuration::parse(&rest[..bytes]).expect("a configuration");
        let last = taken.last_page;
        assert!(last < configuration.pages_max(), "page {last:#x} is beyond {configuration:?}");
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], &'static str> {
    let (array, after) = rest.split_first_chunk::<N>().ok_or("it is cut short")?;
    *rest = after;
    Ok(*array)
}

/// What a splitter has taken out of a stream. Its pages go to a joiner.
struct Taken {
    non_ram: Vec<u8>,
    words: Vec<u64>,
    last_page: u32,
    epoch: Epoch,
    joiner: Joiner,
    record: Record,
}

impl Default for Taken {
    fn default() -> Self {
        Self {
            non_ram: Vec::new(),
            words: Vec::new(),
            last_page: 0,
            epoch: Epoch::default(),
            joiner: Joiner::new(xen::DOMAIN_PAGES_MAX),
            record: Record::default(),
        }
    }
}

impl Sink for Taken {
    fn non_ram(&mut self, bytes: &[u8]) -> ControlFlow<()> {
        self.joiner.non_ram(bytes);
        self.non_ram.extend_from_slice(bytes);
        ControlFlow::Continue(())
    }

    fn epoch(&mut self, epoch: Epoch, position: u64) {
        self.epoch = epoch;
        self.joiner.epoch(epoch, position).expect("epochs in order");
    }

    fn page(&mut self, word: PageWord, _: Option<usize>) -> ControlFlow<()> {
        self.words.push(word.to_bits());
        self.last_page = self.last_page.max(word.page.0);
        let joined = self.joiner.page_data(self.epoch, &[word], &mut self.record);
        assert_eq!(joined, Ok(Joined::Record), "each page is in an epoch once");
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{self, Write};

    use page::PageIndex;
    use xen::fuzzing::stream;
    use xen::{DomainKind, PageKind, write};

    use super::*;

    /// Where `make xen-record` puts them.
    const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/recorded");

    /// Without recordings nothing is checked here, which the suite reports.
    #[test]
    fn recorded_streams_of_real_domains_are_understood_if_there_are_any() {
        let mut count = 0;
        for entry in fs::read_dir(RECORDED).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "xl") {
                continue;
            }
            let recording = Recording::parse(&fs::read(&path).unwrap());
            let recording = recording.unwrap_or_else(|why| panic!("{}: {why}", path.display()));
            recording.check();
            for how in (0..=u8::MAX).step_by(37) {
                stream(&[&[how], &recording.shortened(16)[..]].concat());
            }
            count += 1;
        }
        if count == 0 {
            // Not by `println!`, whose output is captured unless the test fails.
            let text = "no stream of a real xl is recorded (make xen-record): crate xen was tested \
                        with made-up ones only";
            writeln!(io::stdout(), "\nsuite note: {text}").unwrap();
        }
    }

    fn word(page: u32, kind: PageKind) -> PageWord {
        PageWord { page: PageIndex(page), kind }
    }

    /// A made-up stream, and the recording of it: two runs of words, of which one has no bodies.
    fn made_up() -> (Vec<u8>, Vec<u8>) {
        let runs = [(word(3, PageKind::Normal), 2_u32), (word(7, PageKind::Invalid), 3)];
        let run = |(first, count): &(PageWord, u32)| {
            let (from, kind) = (first.page.0, first.kind);
            (from..from + count).map(move |page| word(page, kind))
        };
        let pages: Vec<PageWord> = runs.iter().flat_map(run).collect();
        let (mut before, mut after) = (Vec::new(), Vec::new());
        write::begin(&mut before, DomainKind::Pv);
        write::end(&mut after, DomainKind::Pv);
        after.extend_from_slice(PERMISSION);
        let mut record = Vec::new();
        let bytes = |it: &PageWord| (*it, it.page.0.to_le_bytes()[0]);
        write::page_data(&mut record, &pages.iter().map(bytes).collect::<Vec<_>>());
        let mut recorded = MAGIC.to_vec();
        let plain = |recorded: &mut Vec<u8>, bytes: &[u8]| {
            recorded.push(BYTES);
            recorded.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_le_bytes());
            recorded.extend_from_slice(bytes);
        };
        plain(&mut recorded, &before);
        recorded.push(PAGES);
        recorded.extend_from_slice(&record[..HEAD_BYTES]);
        recorded.extend_from_slice(&2_u32.to_le_bytes());
        for (word, count) in runs {
            recorded.extend_from_slice(&word.to_bits().to_le_bytes());
            recorded.extend_from_slice(&count.to_le_bytes());
        }
        plain(&mut recorded, &after);
        ([before, record, after].concat(), recorded)
    }

    #[test]
    fn a_recording_is_read_as_the_stream_with_other_contents() {
        let (expected, recorded) = made_up();
        let recording = Recording::parse(&recorded).unwrap();
        let mut read = Vec::new();
        recording.each(|piece| read.extend_from_slice(piece));
        assert_eq!(read, expected);
        recording.check();
        let shortened = recording.shortened(1);
        assert_eq!(shortened.len(), expected.len() - PAGE_BYTES - 4 * WORD_BYTES);
        stream(&[&[0], &shortened[..]].concat());
        let record_bytes = HEAD_BYTES + WORD_BYTES + PAGE_BYTES;
        assert_eq!(recording.shortened(0).len(), shortened.len() - record_bytes);
    }

    #[test]
    fn what_is_no_recording_is_refused() {
        let (stream, recorded) = made_up();
        assert!(Recording::parse(&stream).is_err() && Recording::parse(b"").is_err());
        for end in MAGIC.len() + 1..recorded.len() {
            if let Ok(recording) = Recording::parse(&recorded[..end]) {
                // It ends after a part.
                assert!(recording.0.len() < 3, "{end}");
            }
        }
        let many = [MAGIC, &[PAGES], &[0; HEAD_BYTES], &[1, 0, 0, 0], &[0xff; 12][..]].concat();
        assert_eq!(Recording::parse(&many).unwrap_err(), "it has too many pages");
        let unknown = Recording::parse(&[MAGIC, &[7]].concat());
        assert_eq!(unknown.unwrap_err(), "it has an unknown part");
    }
}
