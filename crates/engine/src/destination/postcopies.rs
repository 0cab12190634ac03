//! VMs in post-copy: they run here while part of their memory is still at their source, and stop
//! if this agent ends.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use stream::PostcopyWatch;

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
/// counted until this is dropped.
#[derive(Debug)]
pub(super) struct Relayed {
    all: Arc<Postcopies>,
    watch: PostcopyWatch,
    turned: Option<Postcopy>,
}

impl Relayed {
    pub(super) fn new(all: &Arc<Postcopies>) -> Self {
        Self { all: Arc::clone(all), watch: PostcopyWatch::default(), turned: None }
    }

    /// Parses bytes that are about to be passed on to QEMU here.
    pub(super) fn pass(&mut self, bytes: &[u8]) {
        if self.watch.push(bytes) {
            tracing::info!("the migration is in post-copy");
            self.turned = Some(self.all.one_more());
        }
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
}
