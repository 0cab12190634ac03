//! Reads the beginning of a QEMU's connection, up to the end of RAM's setup, and decides
//! whether its stream can be split.

use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;

use page::{BlockId, Epoch, PageIndex};
use stream::multifd::{MAGIC, MultifdError};
use stream::{Progress, Sink, Splitter, Step, StreamError, StreamKind, resumes_postcopy};
use tap::Taken;

const READ_BYTES: usize = 16 << 10;
/// Without a return path QEMU's migration is finished once it has written everything,
/// and data not delivered by then could not be taken back.
const NO_RETURN_PATH: &str = "without the capability return-path QEMU does not wait until its \
                              destination has loaded the VM";

/// The first bytes of a connection.
#[derive(Debug)]
pub(super) enum Setup {
    /// A main stream up to the end of its setup, or beyond.
    Split {
        /// The bytes read.
        before: Vec<u8>,
        /// Each RAM section ends an epoch.
        epoch_by_section: bool,
    },
    /// Any other connection.
    Whole {
        /// The bytes read.
        before: Vec<u8>,
        /// None: it is not a migration stream.
        why: Option<Reason>,
    },
}

/// Why a QEMU stream is passed on unchanged.
#[derive(Debug)]
pub struct Reason {
    /// For the operator.
    pub(super) text: String,
    /// Whether the destination's QEMU reports when it has loaded the VM.
    pub(super) is_answered: bool,
    /// Whether it resumes a post-copy, so that the VM is at the destination already.
    pub(super) resumes: bool,
}

impl Reason {
    fn new(text: impl Into<String>, is_answered: bool) -> Self {
        Self { text: text.into(), is_answered, resumes: false }
    }

    /// Its VM has a VFIO device, whose data among RAM's sections only QEMU can read.
    pub(super) fn of_vfio() -> Self {
        // Nothing is split without a return path.
        Self::new("the VM has a VFIO device, which writes into the stream as well", true)
    }

    /// The packets of its multifd channels can't be split.
    pub(super) fn of_packets(error: &MultifdError) -> Self {
        let text = match error {
            MultifdError::Compressed { .. } => {
                "QEMU compresses its multifd channels itself; without that (`--compressed` of \
                 virsh) the agents compress"
                    .to_owned()
            }
            error => error.to_string(),
        };
        // Nothing is split without a return path.
        Self::new(text, true)
    }
}

/// Reads the beginning of a connection that has data, `before` of which was read already.
/// Nothing was answered until then: QEMU writes all of its setup without waiting for its
/// destination.
pub(super) fn read(mut socket: &UnixStream, mut before: Vec<u8>) -> io::Result<Setup> {
    let mut splitter = Splitter::answered(StreamKind::Multifd);
    let mut done = 0;
    loop {
        if resumes_postcopy(&before) {
            let why = Reason::new("it resumes a post-copy that was interrupted", false);
            return Ok(Setup::Whole { before, why: Some(Reason { resumes: true, ..why }) });
        }
        let Progress { consumed, step } = match splitter.push(&before[done..], &mut NoPages) {
            Ok(progress) => progress,
            Err(error) => {
                let is_answered = splitter.has_return_path();
                let why = reason(&error).map(|text| Reason::new(text, is_answered));
                return Ok(Setup::Whole { before, why });
            }
        };
        done += consumed;
        if splitter.may_turn_to_postcopy() {
            let why = Reason::new("QEMU may turn to post-copy at any time", true);
            return Ok(Setup::Whole { before, why: Some(why) });
        }
        match step {
            Step::Head(_) if !splitter.has_return_path() => {
                let why = Reason::new(NO_RETURN_PATH, false);
                return Ok(Setup::Whole { before, why: Some(why) });
            }
            Step::Head(_) => {
                let epoch_by_section = splitter.epoch_by_section();
                return Ok(Setup::Split { before, epoch_by_section });
            }
            Step::More { .. } if before.len() + READ_BYTES > Taken::READ_BEFORE_BYTES_MAX => {
                let is_answered = splitter.has_return_path();
                let why = Reason::new("its setup is too long to be read", is_answered);
                return Ok(Setup::Whole { before, why: Some(why) });
            }
            Step::More { .. } => {
                let end = before.len();
                before.resize(end + READ_BYTES, 0);
                let count = socket.read(&mut before[end..])?;
                before.truncate(end + count);
                if count == 0 {
                    return Ok(Setup::Whole { before, why: None });
                }
            }
            Step::Paused | Step::Tail(_) | Step::Rest { .. } | Step::Whole { .. } => {
                return Ok(Setup::Whole { before, why: None });
            }
        }
    }
}

/// Why a stream is passed on unchanged; none if it is not a migration stream.
fn reason(error: &StreamError) -> Option<String> {
    match error {
        StreamError::NotAStream { magic: MAGIC, .. } => {
            Some("it is a multifd channel of a stream that can't be split".to_owned())
        }
        StreamError::NotAStream { .. } => None,
        StreamError::Late(why) => Some(why.to_string()),
        error => Some(error.to_string()),
    }
}

/// A sink for a setup, which has no pages.
struct NoPages;

impl Sink for NoPages {
    fn body(&mut self, _: BlockId, _: PageIndex, _: usize) -> ControlFlow<()> {
        ControlFlow::Break(())
    }

    fn fill(&mut self, _: BlockId, _: PageIndex, _: u8) -> ControlFlow<()> {
        ControlFlow::Break(())
    }

    fn epoch(&mut self, _: Epoch) {}
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use stream::multifd::Init;
    use stream::{Block, write};

    use super::*;

    fn of(bytes: Vec<u8>) -> Setup {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let writer = thread::spawn(move || {
            for piece in bytes.chunks(11) {
                // The reader may stop once it has read enough.
                let _ = ours.write_all(piece);
            }
        });
        let setup = read(&theirs, Vec::new()).unwrap();
        drop(theirs);
        writer.join().unwrap();
        setup
    }

    fn stream(flush: bool, return_path: bool) -> Vec<u8> {
        let mut out = Vec::new();
        write::header(&mut out, Some("pc-q35-7.2"));
        if return_path {
            write::open_return_path(&mut out);
            write::ping(&mut out, 1);
        }
        let blocks = [Block { name: "pc.ram".to_owned(), bytes: 1 << 20 }];
        write::ram_setup(&mut out, 2, &blocks, true, flush);
        out
    }

    #[test]
    fn a_stream_is_split_from_its_setup_on() {
        for flush in [false, true] {
            let bytes = stream(flush, true);
            let Setup::Split { before, epoch_by_section } = of(bytes.clone()) else { panic!() };
            assert!(bytes.starts_with(&before) && before.len() > 60);
            assert_eq!(epoch_by_section, !flush);
        }
    }

    #[test]
    fn a_stream_without_a_return_path_passes_whole() {
        let bytes = stream(true, false);
        let Setup::Whole { before, why: Some(why) } = of(bytes.clone()) else { panic!() };
        assert!(bytes.starts_with(&before) && !why.is_answered);
        assert!(why.text.contains("return-path"), "{}", why.text);
    }

    /// QEMU may send its disks' dirty bitmaps late, and nothing else.
    #[test]
    fn a_stream_with_dirty_bitmaps_is_split() {
        let mut bytes = Vec::new();
        write::header(&mut bytes, Some("pc-q35-7.2"));
        write::open_return_path(&mut bytes);
        write::bitmaps_advise(&mut bytes);
        let blocks = [Block { name: "pc.ram".to_owned(), bytes: 1 << 20 }];
        write::ram_setup(&mut bytes, 2, &blocks, true, false);
        assert!(matches!(of(bytes), Setup::Split { .. }));
    }

    #[test]
    fn a_post_copy_that_is_resumed_passes_whole_and_is_known() {
        let mut bytes = Vec::new();
        write::recv_bitmap(&mut bytes, "pc.ram");
        let Setup::Whole { before, why: Some(why) } = of(bytes.clone()) else { panic!() };
        assert!(bytes.starts_with(&before) && why.resumes && !why.is_answered);

        let mut bytes = stream(true, true);
        bytes.truncate(8);
        write::postcopy_advise(&mut bytes);
        let Setup::Whole { why: Some(why), .. } = of(bytes) else { panic!() };
        assert!(why.is_answered && !why.resumes, "it may turn, and has not");
    }

    #[test]
    fn a_channel_of_a_stream_that_is_not_split_passes_whole() {
        let mut bytes = Vec::new();
        Init { uuid: [5; 16], id: 2 }.write(&mut bytes);
        let Setup::Whole { before, why: Some(why) } = of(bytes.clone()) else { panic!() };
        assert!(bytes.starts_with(&before) && why.text.contains("multifd"), "{}", why.text);

        // What was read already suffices.
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let Setup::Whole { before, why: Some(why) } = read(&ours, bytes.clone()).unwrap() else {
            panic!()
        };
        assert!(before == bytes && !why.is_answered && why.text.contains("multifd"));
    }

    #[test]
    fn whatever_else_it_is_passes_whole() {
        let mut vfio = Vec::new();
        write::header(&mut vfio, Some("pc-q35-7.2"));
        write::section_header(&mut vfio, false, 1, "0000:00:02.0/vfio", 1);
        let mut tls = vec![0x16, 3, 1];
        tls.resize(600, 7);
        for (bytes, has_reason) in [(vfio, true), (tls, false), (Vec::new(), false)] {
            let Setup::Whole { before, why } = of(bytes.clone()) else { panic!() };
            assert!(bytes.starts_with(&before));
            assert_eq!(why.is_some(), has_reason, "{why:?}");
        }
    }
}
