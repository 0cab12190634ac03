//! Tells the directory what is here, and what is not. Nobody waits for that.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use content::Name;
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use directory::{Directory, HostName};

/// Batches that wait to be told. More are not told: it is a hint.
const WAITING_MAX: usize = 4096;
/// Names that are told at once.
const AT_ONCE: usize = 8192;
const WAIT: Duration = Duration::from_secs(2);

enum Told {
    Holds(Vec<Name>),
    Lacks(Vec<Name>),
}

/// Dropping it ends its thread.
#[derive(Debug)]
pub(super) struct Teller {
    tell: Option<Sender<Told>>,
    thread: Option<JoinHandle<()>>,
}

impl Teller {
    /// For the host `me`, of which the directory forgets at first what it knew: this
    /// agent doesn't know any more.
    pub(super) fn start(me: HostName, directory: Arc<dyn Directory>) -> io::Result<Self> {
        let (tell, told) = bounded(WAITING_MAX);
        let thread = thread::Builder::new().name("directory-tell".to_owned()).spawn(move || {
            // One that isn't there has nothing to forget.
            let _ = directory.forget(&me, Instant::now() + WAIT);
            run(&me, &*directory, &told);
        })?;
        Ok(Self { tell: Some(tell), thread: Some(thread) })
    }

    pub(super) fn holds(&self, names: Vec<Name>) {
        self.tell(Told::Holds(names));
    }

    pub(super) fn lacks(&self, names: Vec<Name>) {
        self.tell(Told::Lacks(names));
    }

    fn tell(&self, told: Told) {
        match self.tell.as_ref().map(|tell| tell.try_send(told)) {
            None | Some(Ok(()) | Err(TrySendError::Disconnected(_))) => {}
            Some(Err(TrySendError::Full(_))) => tracing::debug!("the directory is slow; not told"),
        }
    }
}

fn run(me: &HostName, directory: &dyn Directory, told: &Receiver<Told>) {
    let (mut held, mut lacked) = (Vec::new(), Vec::new());
    while let Ok(first) = told.recv() {
        held.clear();
        lacked.clear();
        for one in std::iter::once(first).chain(told.try_iter()) {
            match one {
                Told::Holds(names) => held.extend(names),
                Told::Lacks(names) => lacked.extend(names),
            }
            if held.len() + lacked.len() >= AT_ONCE {
                break;
            }
        }
        let until = Instant::now() + WAIT;
        let held = if held.is_empty() { Ok(()) } else { directory.hold(me, &held, until) };
        let lacked = if lacked.is_empty() { Ok(()) } else { directory.release(me, &lacked, until) };
        if let Err(error) = held.and(lacked) {
            tracing::debug!(%error, "the directory was not told");
        }
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.tell = None;
        if let Some(thread) = self.thread.take() {
            // It says what it has to say to nobody.
            let _ = thread.join();
        }
    }
}
