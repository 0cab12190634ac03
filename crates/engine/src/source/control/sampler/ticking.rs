//! Runs a function about twenty times a second on a thread of its own.

use std::io;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, after, bounded, never, select};
use data_threads::{Guard, Joined};
use qemu::outgoing;
use qemu::qmp::Event;

/// The usual interval, as often as figures change.
pub(crate) const USUAL: Duration = Duration::from_millis(50);
/// The interval while waiting costs downtime or migration time.
pub(crate) const SOON: Duration = Duration::from_millis(10);

/// The thread, which ends when this is dropped.
pub(crate) struct Ticking {
    /// None once it must end.
    stop: Option<Sender<()>>,
    thread: Joined,
}

impl Ticking {
    /// Starts it; `sample` returns the time until its next call. It is also called when
    /// QEMU's first pass ends, according to `passes`.
    pub(crate) fn start(
        guard: Option<Guard>,
        mut passes: Receiver<Event>,
        mut sample: impl FnMut() -> Duration + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = bounded::<()>(0);
        let run = move || {
            let _guard = guard;
            let mut next = after(USUAL);
            loop {
                select! {
                    recv(next) -> _ => {}
                    recv(passes) -> event => match event {
                        Ok(event) if !outgoing::ends_first_pass(&event) => continue,
                        // Only once, because a held QEMU makes hundreds of passes a
                        // second.
                        _ => passes = never(),
                    },
                    recv(stopped) -> _ => return,
                }
                data_threads::point();
                next = after(sample());
            }
        };
        let thread = data_threads::spawn("sampler", run)?;
        Ok(Self { stop: Some(stop), thread: thread.into() })
    }

    /// Ends the thread, and drops the function.
    pub(crate) fn stop(&mut self) {
        self.stop = None;
        self.thread.join();
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
    fn the_end_of_the_first_pass_is_sampled_once() {
        let (qemu, passes) = unbounded();
        let (looks, looked) = unbounded();
        let _ticking = Ticking::start(None, passes, move || {
            let _ = looks.send(());
            NEVER
        });
        // The usual tick.
        looked.recv().unwrap();
        let pass = |pass| Event {
            name: "MIGRATION_PASS".to_owned(),
            data: json!({ "pass": pass }),
            at: Instant::now(),
        };
        qemu.send(pass(1)).unwrap();
        qemu.send(pass(2)).unwrap();
        looked.recv().unwrap();
        // No later event of QEMU is followed.
        while qemu.send(pass(3)).is_ok() {}
        assert!(looked.try_recv().is_err());
    }
}
