//! A lock over ranges that scans a plain list of requests, with the guarantees of the range lock.

use std::hint;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};

use parking_lot::Mutex;

/// As the range lock spins before it sleeps.
const SPINS: usize = 64;

/// What is held and waited for. The counts have the order of requests, not the list.
#[derive(Default)]
pub(crate) struct PlainScan(Mutex<Vec<Request>>);

struct Request {
    range: Range<usize>,
    /// Requests that overlap this one, were made earlier, and are not given back. None: it is held.
    ahead: usize,
    /// None for a request that did not have to wait.
    waiter: Option<Waiter>,
}

struct Waiter {
    granted: Arc<AtomicBool>,
    thread: Thread,
}

impl PlainScan {
    pub(crate) fn lock(&self, range: &Range<usize>) {
        let mut requests = self.0.lock();
        let ahead = requests.iter().filter(|other| overlap(&other.range, range)).count();
        let granted = (ahead > 0).then(|| Arc::new(AtomicBool::new(false)));
        let waiter = granted.clone().map(|granted| Waiter { granted, thread: thread::current() });
        requests.push(Request { range: range.clone(), ahead, waiter });
        drop(requests);
        let Some(granted) = granted else { return };
        let is_granted = || granted.load(Ordering::Acquire);
        for _ in 0..SPINS {
            if is_granted() {
                return;
            }
            hint::spin_loop();
        }
        while !is_granted() {
            thread::park();
        }
    }

    pub(crate) fn unlock(&self, range: &Range<usize>) {
        let mut granted = Vec::new();
        let mut requests = self.0.lock();
        let held = requests.iter().position(|one| one.ahead == 0 && one.range == *range);
        requests.swap_remove(held.expect("it is held"));
        for request in requests.iter_mut().filter(|other| overlap(&other.range, range)) {
            request.ahead -= 1;
            if request.ahead == 0 {
                granted.extend(request.waiter.take());
            }
        }
        drop(requests);
        for waiter in granted {
            waiter.granted.store(true, Ordering::Release);
            waiter.thread.unpark();
        }
    }
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}
