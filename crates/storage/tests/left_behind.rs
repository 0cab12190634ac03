//! Threads that storage holds. A program of its own: the whole process has one count of them.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use parking_lot::RwLock;
use storage::{
    Buffer, Consumer, Failure, Item, OpenError, Pages, Reader, Settings, Source, abandoned_threads,
};

/// Storage that answers no request while its lock is held.
struct Hangs(Arc<RwLock<()>>);

impl Source for Hangs {
    fn bytes(&self) -> u64 {
        1 << 30
    }

    fn read(&self, _: u64, _: usize, _: &mut Buffer) -> Result<Range<usize>, Failure> {
        drop(self.0.read());
        Err(Failure::Stopped)
    }

    fn interrupt(&self) {}
}

struct Nobody;

impl Consumer for Nobody {
    fn read(&self, _: Pages<'_>) {}
    fn failed(&self, _: &[Item], _: &Failure) {}
}

#[test]
fn with_64_of_them_no_reader_is_started() {
    let lock = Arc::new(RwLock::new(()));
    let start = |in_flight| {
        let settings = Settings { in_flight, ..Settings::default() };
        Reader::start(Box::new(Hangs(Arc::clone(&lock))), Arc::new(Nobody), settings)
    };
    let held = lock.write();
    for (in_flight, left_behind) in [(63, 63), (1, 64)] {
        let reader = start(in_flight).unwrap();
        let items = (0..in_flight as u64).map(|nth| Item { offset: nth << 20, token: nth });
        reader.add(&items.collect::<Vec<_>>()).unwrap();
        while reader.progress().in_flight < in_flight {
            thread::yield_now();
        }
        drop(reader);
        assert_eq!(abandoned_threads(), left_behind);
    }
    assert!(matches!(start(1), Err(OpenError::Abandoned { threads: 64 })));
    // The storage answers after all.
    drop(held);
    while abandoned_threads() > 0 {
        thread::yield_now();
    }
    drop(start(1).unwrap());
}
