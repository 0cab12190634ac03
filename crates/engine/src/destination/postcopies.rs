//! VMs in post-copy: they run here while part of their memory is still at their source, and stop
//! if this agent ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use stream::PostcopyWatch;
use stream::return_path::Follower;

/// The number of such VMs.
#[derive(Debug, Default)]
pub(super) struct Postcopies {
    number: Mutex<usize>,
    changed: Condvar,
}

impl Postcopies {
    fn one_more(self: &Arc<Self>) -> Postcopy {
        *self.number.lock() += 1;
        Postcopy { all: Arc::clone(self) }
    }

    /// Waits until there is none, at most until `until`. Returns how many are left.
    pub(super) fn wait_none(&self, until: Instant) -> usize {
        let mut number = self.number.lock();
        while *number > 0 && !self.changed.wait_until(&mut number, until).timed_out() {}
        *number
    }
}

/// Counts one of these VMs until it is dropped.
#[derive(Debug)]
struct Postcopy {
    all: Arc<Postcopies>,
}

impl Drop for Postcopy {
    fn drop(&mut self) {
        *self.all.number.lock() -= 1;
        self.all.changed.notify_all();
    }
}

/// Watches a relayed connection. If it is a VM's that turns to post-copy, or resumes it, the VM is
/// counted until this and its [`Answers`] are dropped.
#[derive(Debug)]
pub(super) struct Relayed {
    watch: PostcopyWatch,
    vm: Arc<Vm>,
}

/// What QEMU here answers on that connection.
#[derive(Debug)]
pub(super) struct Answers {
    follower: Follower,
    vm: Arc<Vm>,
}

#[derive(Debug)]
struct Vm {
    all: Arc<Postcopies>,
    /// The connection is a QEMU's, as far as is known.
    is_qemus: AtomicBool,
    turned: Mutex<Option<Postcopy>>,
}

impl Vm {
    fn turns(&self) {
        self.turned.lock().get_or_insert_with(|| {
            tracing::info!("the migration is in post-copy");
            self.all.one_more()
        });
    }
}

impl Relayed {
    pub(super) fn new(all: &Arc<Postcopies>) -> Self {
        let vm =
            Vm { all: Arc::clone(all), is_qemus: AtomicBool::new(false), turned: Mutex::default() };
        Self { watch: PostcopyWatch::default(), vm: Arc::new(vm) }
    }

    /// For the thread that relays the connection instead, from its first byte on.
    pub(super) fn by_another(&self) -> Self {
        Self { watch: PostcopyWatch::default(), vm: Arc::clone(&self.vm) }
    }

    pub(super) fn answers(&self) -> Answers {
        Answers { follower: Follower::default(), vm: Arc::clone(&self.vm) }
    }

    /// Parses bytes that are about to be passed on to QEMU here.
    pub(super) fn pass(&mut self, bytes: &[u8]) {
        let turns = self.watch.push(bytes);
        self.vm.is_qemus.store(self.watch.is_stream(), Relaxed);
        if turns {
            self.vm.turns();
        }
    }
}

impl Answers {
    /// Parses bytes that came from QEMU here. A request for pages shows post-copy where the
    /// stream can't be parsed that far.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.follower.push(bytes);
        // Other servers' answers may look like any message.
        if self.follower.requests_pages() && self.vm.is_qemus.load(Relaxed) {
            self.vm.turns();
        }
    }

    /// The code of the SHUT in them, if there was one.
    pub(super) fn shut(&self) -> Option<u32> {
        self.follower.shut()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use page::PageIndex;
    use stream::write;

    use super::*;

    #[test]
    fn a_vm_is_waited_for_from_post_copy_on_until_its_connection_has_ended() {
        let all = Arc::<Postcopies>::default();
        let left = || all.wait_none(Instant::now() + Duration::from_millis(1));
        let mut relayed = Relayed::new(&all);
        let mut stream = Vec::new();
        write::header(&mut stream, Some("pc-q35-10.0"));
        write::postcopy_advise(&mut stream);
        relayed.pass(&stream);
        assert_eq!(left(), 0);
        stream.clear();
        write::postcopy_discard(&mut stream, "pc.ram", PageIndex(1));
        relayed.pass(&stream);
        assert_eq!(left(), 1);
        drop(relayed);
        assert_eq!(left(), 0);

        // Its manager resumes it.
        let mut relayed = Relayed::new(&all);
        stream.clear();
        write::recv_bitmap(&mut stream, "pc.ram");
        relayed.pass(&stream);
        assert_eq!(left(), 1);
        drop(relayed);
        assert_eq!(left(), 0);
    }

    /// Between RAM's sections is what only QEMU can read.
    #[test]
    fn a_request_for_pages_tells_of_post_copy_too() {
        const REQUEST: [u8; 6] = [0, 4, 0, 2, 9, 9];
        let all = Arc::<Postcopies>::default();
        let left = || all.wait_none(Instant::now() + Duration::from_millis(1));
        let mut stream = Vec::new();
        write::header(&mut stream, Some("pc-q35-10.0"));
        write::section_header(&mut stream, false, 1, "0000:00:02.0/vfio", 1);
        for (begins, expected) in [(&stream[..], 1), (b"a disk's client", 0)] {
            let mut relayed = Relayed::new(&all).by_another();
            let mut answers = relayed.answers();
            relayed.pass(begins);
            answers.push(&REQUEST[..3]);
            assert_eq!(left(), 0);
            answers.push(&REQUEST[3..]);
            assert_eq!(left(), expected);
            drop(relayed);
            assert_eq!(left(), expected, "its other direction is still open");
            drop(answers);
            assert_eq!(left(), 0);
        }
    }
}
