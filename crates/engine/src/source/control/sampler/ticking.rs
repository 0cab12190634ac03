//! Something that is done some twenty times a second, on a thread of its own.

use std::io;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, after, bounded, never, select};
use qemu::outgoing;
use qemu::qmp::Event;

/// As often as things change.
pub(crate) const USUAL: Duration = Duration::from_millis(50);
/// What waits for this costs downtime, or the whole migration time.
pub(crate) const SOON: Duration = Duration::from_millis(10);

/// Ends when it is dropped.
pub(crate) struct Ticking {
    /// None once it is to end.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticking {
    /// `sample` says when it is to be called again. It is also called when QEMU's first
    /// pass is over, by these events.
    pub(crate) fn start(
        mut passes: Receiver<Event>,
        mut sample: impl FnMut() -> Duration + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = bounded::<()>(0);
        let run = move || {
            let mut next = after(USUAL);
            loop {
                select! {
                    recv(next) -> _ => {}
                    recv(passes) -> event => match event {
                        Ok(event) if !outgoing::ends_first_pass(&event) => continue,
                        // Once: a QEMU that is held makes hundreds of passes a second.
                        _ => passes = never(),
                    },
                    recv(stopped) -> _ => return,
                }
                next = after(sample());
            }
        };
        let thread = data_threads::spawn("sampler", run)?;
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use crossbeam_channel::unbounded;
    use serde_json::json;

    use super::*;

    const NEVER: Duration = Duration::from_secs(3600);

    #[test]
    fn the_end_of_the_first_pass_is_looked_at_once() {
        let (qemu, passes) = unbounded();
        let (looks, looked) = unbounded();
        let _ticking = Ticking::start(passes, move || {
            let _ = looks.send(());
            NEVER
        });
        // The usual one.
        looked.recv().unwrap();
        let pass = |pass| Event {
            name: "MIGRATION_PASS".to_owned(),
            data: json!({ "pass": pass }),
            at: Instant::now(),
            happened: None,
        };
        qemu.send(pass(1)).unwrap();
        qemu.send(pass(2)).unwrap();
        looked.recv().unwrap();
        // Its end is not heard, nor anything else of it.
        while qemu.send(pass(3)).is_ok() {}
        assert!(looked.try_recv().is_err());
    }
}
