//! A directory under test, and the time that passes for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use content::{Domain, Key, Name};
use directory::{Answer, Directory, HostName};
use parking_lot::Mutex;

/// Longer than any step takes here, on the slowest machine.
const WAIT: Duration = Duration::from_secs(60);

pub(crate) trait World: Sync {
    fn directory(&self) -> &dyn Directory;

    /// Lets time pass for the directory only.
    fn pass(&self, time: Duration);
}

/// A clock that a test moves.
#[derive(Clone, Debug)]
pub(crate) struct Clock(Arc<Mutex<Instant>>);

impl Clock {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    pub(crate) fn now(&self) -> Instant {
        *self.0.lock()
    }

    pub(crate) fn pass(&self, time: Duration) {
        *self.0.lock() += time;
    }
}

pub(crate) fn soon() -> Instant {
    Instant::now() + WAIT
}

pub(crate) fn host(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

/// The names of contents `from..to` of some world.
pub(crate) fn names(world: &str, contents: std::ops::Range<u64>) -> Vec<Name> {
    let key = Key::new(world.as_bytes(), &Domain::default());
    contents.map(|content| key.name(&content.to_le_bytes())).collect()
}

pub(crate) fn claim(directory: &dyn Directory, host: &HostName, names: &[Name]) -> Vec<Answer> {
    let mut answers = vec![Answer::Yours];
    directory.claim(host, names, &mut answers, soon()).unwrap();
    assert_eq!(answers.len(), names.len());
    answers
}
