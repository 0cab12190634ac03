//! Reads the beginning of a QEMU's connection, up to the end of RAM's setup, and decides
//! whether its stream can be split.

use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;

use page::{BlockId, Epoch, PageIndex};
use stream::{Progress, Sink, Splitter, Step, StreamError, StreamKind};
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
}

/// Reads the beginning of a connection that has data. Nothing was answered until then:
/// QEMU writes all of its setup without waiting for its destination.
pub(super) fn read(mut socket: &UnixStream) -> io::Result<Setup> {
    let mut splitter = Splitter::answered(StreamKind::Multifd);
    let (mut before, mut done) = (Vec::new(), 0);
    loop {
        let Progress { consumed, step } = match splitter.push(&before[done..], &mut NoPages) {
            Ok(progress) => progress,
            Err(error) => {
                let is_answered = splitter.has_return_path();
                let why = reason(&error).map(|text| Reason { text, is_answered });
                return Ok(Setup::Whole { before, why });
            }
        };
        done += consumed;
        if splitter.may_turn_to_postcopy() {
            let text = "QEMU may turn to post-copy at any time".to_owned();
            return Ok(Setup::Whole { before, why: Some(Reason { text, is_answered: true }) });
        }
        match step {
            Step::Head(_) if !splitter.has_return_path() => {
                let text = NO_RETURN_PATH.to_owned();
                return Ok(Setup::Whole { before, why: Some(Reason { text, is_answered: false }) });
            }
            Step::Head(_) => {
                let epoch_by_section = splitter.epoch_by_section();
                return Ok(Setup::Split { before, epoch_by_section });
            }
            Step::More { .. } if before.len() + READ_BYTES > Taken::READ_BEFORE_BYTES_MAX => {
                let text = "its setup is too long to be looked at".to_owned();
                let is_answered = splitter.has_return_path();
                return Ok(Setup::Whole { before, why: Some(Reason { text, is_answered }) });
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
        let setup = read(&theirs).unwrap();
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
