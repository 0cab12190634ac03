//! The text of `/metrics`, collected once for all who read it within a second.
//!
//! A collection queries the QEMU of every VM, and at an address of its own anyone may read: without
//! this, a reader that never pauses would take CPU time from all VMs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// How long a text is served.
const KEPT: Duration = Duration::from_secs(1);
/// How long a reader waits for a collection, and then gets the text of the previous one. A QEMU
/// whose connection has ended may take longer; Prometheus waits for 10 s.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// The text that was collected last; all clones share it.
#[derive(Clone)]
pub(crate) struct CachedText {
    kept: Duration,
    wait_max: Duration,
    last: Arc<watch::Sender<Last>>,
}

#[derive(Default)]
struct Last {
    /// None until the first collection has ended, and if the last one failed.
    text: Option<Bytes>,
    collected: Option<Instant>,
    is_collecting: bool,
}

impl Default for CachedText {
    fn default() -> Self {
        Self::new(KEPT, WAIT_MAX)
    }
}

impl CachedText {
    pub(crate) fn new(kept: Duration, wait_max: Duration) -> Self {
        Self { kept, wait_max, last: Arc::new(watch::Sender::new(Last::default())) }
    }

    /// The text, by `collect` if the last one is too old and no collection is running.
    ///
    /// The collection continues if its reader disconnects: otherwise the next reader would start
    /// another concurrently.
    pub(super) async fn read(
        &self,
        collect: impl FnOnce() -> String + Send + 'static,
    ) -> Option<Bytes> {
        let mut last = self.last.subscribe();
        let is_due = self.last.send_if_modified(|last| {
            let is_old = last.collected.is_none_or(|at| at.elapsed() >= self.kept);
            let is_due = is_old && !last.is_collecting;
            last.is_collecting |= is_due;
            is_due
        });
        if is_due {
            let last = Arc::clone(&self.last);
            tokio::spawn(async move {
                // A panic was logged.
                let text = spawn_blocking(collect).await.ok().map(Bytes::from);
                let collected = Some(Instant::now());
                last.send_replace(Last { text, collected, is_collecting: false });
            });
        }
        // After a timeout, the previous text is served.
        let _ = timeout(self.wait_max, last.wait_for(|last| !last.is_collecting)).await;
        last.borrow().text.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc::{Receiver, channel};

    use tokio::task::JoinSet;

    use super::*;

    const EVER: Duration = Duration::from_secs(3600);

    /// Counts the collection, and waits until it may end.
    fn collect(count: &Arc<AtomicUsize>, ends: Receiver<()>) -> impl FnOnce() -> String + use<> {
        let count = Arc::clone(count);
        move || {
            let nth = count.fetch_add(1, SeqCst) + 1;
            // An error means that it may end, too.
            let _ = ends.recv();
            format!("collection {nth}")
        }
    }

    #[tokio::test]
    async fn many_readers_cause_one_collection() {
        let cached = CachedText::new(EVER, EVER);
        let count = Arc::new(AtomicUsize::new(0));
        let (end, mut ends) = (0..100).map(|_| channel()).unzip::<_, _, Vec<_>, Vec<_>>();
        let mut readers = JoinSet::new();
        for ends in ends.drain(..) {
            let (cached, collect) = (cached.clone(), collect(&count, ends));
            readers.spawn(async move { cached.read(collect).await });
        }
        while cached.last.receiver_count() < end.len() {
            tokio::task::yield_now().await;
        }
        drop(end);
        while let Some(text) = readers.join_next().await {
            assert_eq!(text.unwrap().unwrap(), "collection 1");
        }
        // As long as the text is kept.
        assert_eq!(cached.read(|| unreachable!()).await.unwrap(), "collection 1");
        assert_eq!(count.load(SeqCst), 1);
    }

    #[tokio::test]
    async fn a_collection_that_hangs_holds_no_reader_up() {
        let cached = CachedText::new(Duration::ZERO, Duration::ZERO);
        let count = Arc::new(AtomicUsize::new(0));
        let (end, ends) = channel();
        assert!(cached.read(collect(&count, ends)).await.is_none(), "there is none yet");
        end.send(()).unwrap();
        let patient = CachedText { kept: EVER, wait_max: EVER, ..cached.clone() };
        assert_eq!(patient.read(|| unreachable!()).await.unwrap(), "collection 1");

        let (end, ends) = channel();
        let hangs = cached.read(collect(&count, ends)).await;
        assert_eq!(hangs.unwrap(), "collection 1", "the previous one");
        assert_eq!(cached.read(|| unreachable!()).await.unwrap(), "collection 1");
        drop(end);
    }

    #[tokio::test]
    async fn a_reader_that_leaves_and_one_that_panics_hinder_no_other() {
        let cached = CachedText::new(Duration::ZERO, EVER);
        let count = Arc::new(AtomicUsize::new(0));
        let (end, ends) = channel();
        let reader = tokio::spawn({
            let (cached, collect) = (cached.clone(), collect(&count, ends));
            async move { cached.read(collect).await }
        });
        while !cached.last.borrow().is_collecting {
            tokio::task::yield_now().await;
        }
        reader.abort();
        let mut next = std::pin::pin!(cached.read(|| unreachable!()));
        assert!(timeout(Duration::ZERO, &mut next).await.is_err(), "it waits for the same one");
        drop(end);
        assert_eq!(next.await.unwrap(), "collection 1");
        assert!(cached.read(|| panic!("on purpose")).await.is_none());
        assert_eq!(cached.read(|| "again".to_owned()).await.unwrap(), "again");
    }
}
