//! What has passed on a relayed connection, and whether the VM can still stay here.
//!
//! It can't once the destination's QEMU has loaded it (SHUT), nor once the migration has
//! turned to post-copy: then the VM runs there while part of its memory is still here, and
//! stops if the connection breaks. The first command of post-copy shows that in time. Where
//! the stream can't be parsed that far, the destination's first request for a page does. A
//! post-copy that is resumed is one from its first byte on.
//!
//! A QEMU without a return path doesn't wait for its destination: once it has closed its connection
//! its migration may have completed, and what is still on its way is the only copy.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use api::Phase;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use stream::PostcopyWatch;
use stream::return_path::{Follower, SHUT};

use crate::report_builder::ReportBuilder;

/// What has passed on a relayed connection.
#[derive(Default)]
pub(super) struct Passed {
    /// Bytes towards the destination.
    pub(super) bytes: AtomicU64,
    /// `None` for a disk's connection, and for a multifd channel: the main one decides.
    vm: Option<Vm>,
    is_channel: bool,
    /// `None` if the bytes can't be parsed, or are not answered.
    qemus: Option<Qemus>,
}

/// Whether a migration's VM can still stay here.
struct Vm {
    is_committed: AtomicBool,
    report_builder: Arc<ReportBuilder>,
}

/// The two QEMUs of a stream that the destination's answers.
struct Qemus {
    stream: Mutex<PostcopyWatch>,
    answers: Mutex<Answers>,
}

/// What the destination's QEMU has answered.
enum Answers {
    /// Messages.
    All(Follower),
    /// Where a post-copy is resumed, only the last bytes count. Messages can't be followed
    /// there: between them are bitmaps of pages, whose bytes may look like any message.
    Last([u8; SHUT.len()]),
}

impl Passed {
    /// For a stream that the destination's QEMU answers.
    pub(super) fn answered(report_builder: &Arc<ReportBuilder>) -> Self {
        Self::of(Some(Qemus::new(Answers::All(Follower::default()))), report_builder)
    }

    /// For a stream that resumes a post-copy.
    pub(super) fn resumed(report_builder: &Arc<ReportBuilder>) -> Self {
        let qemus = Qemus::new(Answers::Last([0; SHUT.len()]));
        let passed = Self::of(Some(qemus), report_builder);
        passed.turn();
        passed
    }

    /// For a stream without a return path, or an encrypted one, which doesn't reveal whether it has
    /// one.
    pub(super) fn unanswered(report_builder: &Arc<ReportBuilder>) -> Self {
        Self::of(None, report_builder)
    }

    /// For a multifd channel.
    pub(super) fn of_channel() -> Self {
        Self { is_channel: true, ..Self::default() }
    }

    fn of(qemus: Option<Qemus>, report_builder: &Arc<ReportBuilder>) -> Self {
        let vm =
            Vm { is_committed: AtomicBool::new(false), report_builder: Arc::clone(report_builder) };
        Self { vm: Some(vm), qemus, ..Self::default() }
    }

    /// Parses bytes that are about to go to the destination.
    pub(super) fn forth(&self, bytes: &[u8]) {
        let Some(qemus) = &self.qemus else { return };
        let begins = qemus.stream.lock().push(bytes);
        if begins {
            self.turn();
        }
    }

    /// QEMU here has closed its connection. What it wrote before may not have been read yet.
    pub(super) fn closed(&self) {
        // With answers, it completes only after the last of them.
        if self.qemus.is_none() && self.commit() {
            self.note(
                "QEMU here has closed its connection, and may have completed its migration without \
                 waiting for its destination: what it wrote is delivered, and can't be cancelled",
            );
        }
    }

    /// Whether a cancel leaves the VM here. `socket` is the connection to QEMU.
    pub(super) fn may_cancel(&self, socket: &UnixStream) -> bool {
        let has_closed = has_closed(socket);
        if has_closed {
            self.closed();
        }
        // The main connection may be committed, or be so soon.
        !(self.is_committed() || has_closed && self.is_channel)
    }

    /// Parses bytes that came from the destination.
    pub(super) fn back(&self, bytes: &[u8]) {
        let Some(qemus) = &self.qemus else { return };
        let (is_loaded, requests_pages) = {
            let mut answers = qemus.answers.lock();
            answers.push(bytes);
            (answers.is_loaded(), answers.requests_pages())
        };
        if requests_pages {
            self.turn();
        }
        if is_loaded {
            self.commit();
        }
    }

    /// Whether the destination's QEMU has loaded the VM.
    pub(super) fn is_loaded(&self) -> bool {
        self.qemus.as_ref().is_some_and(|qemus| qemus.answers.lock().is_loaded())
    }

    /// Whether the migration may be ended for a fault that only the agents see: both QEMUs can be
    /// followed, and the VM can still stay here.
    pub(super) fn may_end(&self) -> bool {
        self.qemus.is_some() && !self.is_committed()
    }

    /// Whether the VM can't stay here any more.
    pub(super) fn is_committed(&self) -> bool {
        self.vm.as_ref().is_some_and(|vm| vm.is_committed.load(SeqCst))
    }

    /// What a failure means for a VM that can't stay here any more.
    pub(super) fn stands(&self) -> &'static str {
        match &self.qemus {
            Some(_) => {
                "the migration had turned to post-copy, and the VM stands still until its manager \
                 resumes the migration"
            }
            None => {
                "QEMU here had closed its connection before all of its stream was delivered: only \
                 the VM's manager knows whether its migration had completed"
            }
        }
    }

    /// The migration has turned to post-copy.
    fn turn(&self) {
        if self.commit() {
            self.note(
                "the migration has turned to post-copy: if it breaks off, the VM stops until \
                 its manager resumes the migration",
            );
        }
    }

    /// Returns whether that is new.
    fn commit(&self) -> bool {
        let Some(vm) = &self.vm else { return false };
        let is_new = !vm.is_committed.swap(true, SeqCst);
        if is_new {
            vm.report_builder.enter(Phase::Committed);
        }
        is_new
    }

    fn note(&self, text: &str) {
        if let Some(vm) = &self.vm {
            vm.report_builder.note(text);
        }
    }
}

/// Whether the other end of a connection has closed it.
fn has_closed(socket: &UnixStream) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    let found = poll(&mut polled, Some(&Timespec::default()));
    found.is_ok() && polled[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP)
}

impl Answers {
    fn push(&mut self, bytes: &[u8]) {
        match self {
            Self::All(messages) => messages.push(bytes),
            Self::Last(last) => {
                let new = &bytes[bytes.len().saturating_sub(last.len())..];
                last.rotate_left(new.len());
                let kept = last.len() - new.len();
                last[kept..].copy_from_slice(new);
            }
        }
    }

    /// Whether they report that the VM is loaded, also as their last bytes.
    fn is_loaded(&self) -> bool {
        match self {
            Self::All(messages) => messages.shut() == Some(0),
            Self::Last(last) => *last == SHUT,
        }
    }

    fn requests_pages(&self) -> bool {
        matches!(self, Self::All(messages) if messages.requests_pages())
    }
}

impl Qemus {
    fn new(answers: Answers) -> Self {
        Self { stream: Mutex::default(), answers: Mutex::new(answers) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use api::{Bounds, Outcome, Progress};
    use page::PageIndex;
    use stream::{Block, write};

    use super::*;
    use crate::watch::Watch;

    const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 1];
    const REQUEST: [u8; 6] = [0, 4, 0, 2, 9, 9];

    fn report_builder() -> Arc<ReportBuilder> {
        let progress = Progress::new(("deadbeef", "web1"), ("host-a", "host-b"), 0);
        let watch = Arc::new(Watch::new(progress, Bounds::default()));
        Arc::new(ReportBuilder::new(watch, 300))
    }

    fn relayed() -> (Arc<ReportBuilder>, Passed) {
        let report_builder = report_builder();
        let passed = Passed::answered(&report_builder);
        (report_builder, passed)
    }

    fn setup() -> Vec<u8> {
        let mut out = Vec::new();
        write::header(&mut out, Some("pc-q35-10.0"));
        write::open_return_path(&mut out);
        write::postcopy_advise(&mut out);
        let blocks = [Block { name: "pc.ram".to_owned(), bytes: 1 << 20 }];
        write::ram_setup(&mut out, 2, &blocks, true, false);
        out
    }

    fn says_so(report_builder: &ReportBuilder) -> bool {
        let report = report_builder.end(Outcome::Done);
        report.notes.iter().any(|note| note.contains("post-copy"))
    }

    #[test]
    fn post_copy_and_the_last_answer_can_not_be_taken_back() {
        let (report_builder, passed) = relayed();
        passed.forth(&setup());
        passed.back(&PONG);
        assert!(!passed.is_committed() && passed.may_end(), "it may turn, and has not");
        let mut turn = Vec::new();
        write::postcopy_discard(&mut turn, "pc.ram", PageIndex(1));
        passed.forth(&turn);
        assert!(passed.is_committed() && !passed.is_loaded() && !passed.may_end());
        assert_eq!(report_builder.watch().progress().1.phase, Phase::Committed);
        passed.back(&SHUT);
        assert!(passed.is_loaded() && says_so(&report_builder));

        // The stream can't be parsed.
        let (report_builder, passed) = relayed();
        passed.forth(b"what nobody knows");
        passed.back(&REQUEST);
        assert!(passed.is_committed() && says_so(&report_builder));

        let (report_builder, passed) = relayed();
        passed.forth(&setup());
        passed.back(&SHUT);
        assert!(passed.is_committed() && !says_so(&report_builder));
    }

    #[test]
    fn a_post_copy_that_is_resumed_can_not_be_taken_back_from_its_beginning() {
        let report_builder = report_builder();
        let passed = Passed::resumed(&report_builder);
        assert!(passed.is_committed() && !passed.is_loaded());
        assert_eq!(report_builder.watch().progress().1.phase, Phase::Committed);
        let mut stream = Vec::new();
        write::recv_bitmap(&mut stream, "pc.ram");
        passed.forth(&stream);
        // A bitmap follows its message, and may look like the last one.
        passed.back(&[0, 5, 0, 1, 6]);
        passed.back(&[&SHUT[..], &[0xff; 20]].concat());
        assert!(!passed.is_loaded());
        for piece in [&PONG[..], &SHUT[..3], &SHUT[3..]] {
            assert!(!passed.is_loaded());
            passed.back(piece);
        }
        assert!(passed.is_loaded() && says_so(&report_builder));
    }

    #[test]
    fn a_disks_bytes_are_not_taken_for_a_qemus() {
        let passed = Passed::default();
        passed.back(&[&REQUEST[..], &SHUT].concat());
        assert!(!passed.is_committed() && !passed.is_loaded());
        passed.closed();
        assert!(!passed.is_committed(), "it has no VM");
    }

    /// Its last megabyte may still be in the agents, and is lost if the relay is cancelled.
    #[test]
    fn what_a_qemu_that_waits_for_nobody_wrote_before_it_closed_can_not_be_cancelled() {
        let report_builder = report_builder();
        let passed = Passed::unanswered(&report_builder);
        let (ours, mut qemus) = UnixStream::pair().unwrap();
        qemus.write_all(b"the last pages").unwrap();
        assert!(passed.may_cancel(&ours));
        assert!(!passed.may_end(), "an encrypted stream may be in post-copy");
        drop(qemus);
        assert!(!passed.may_cancel(&ours), "nothing was read yet");
        assert_eq!(report_builder.watch().progress().1.phase, Phase::Committed);

        assert!(!Passed::of_channel().may_cancel(&ours), "of the same migration");

        // It closes early only if its migration fails.
        let (_report_builder, passed) = relayed();
        assert!(passed.may_cancel(&ours));
    }
}
