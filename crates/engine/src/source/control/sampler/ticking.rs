//! Something that is done twenty times a second, on a thread of its own.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Sender, bounded, select, tick};

const EVERY: Duration = Duration::from_millis(50);

/// Ends when it is dropped.
pub(crate) struct Ticking {
    /// None once it is to end.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticking {
    pub(crate) fn start(mut sample: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = bounded::<()>(0);
        let run = move || {
            let ticks = tick(EVERY);
            loop {
                select! {
                    recv(ticks) -> _ => sample(),
                    recv(stopped) -> _ => return,
                }
            }
        };
        let thread = thread::Builder::new().name("sampler".to_owned()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    /// Ends it, and what it holds.
    pub(crate) fn stop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        self.stop();
    }
}
