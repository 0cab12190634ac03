//! The end of a guest, as its QEMU reports it.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError};
use qemu::qmp::{Event, Qmp};

/// After this, an ending QEMU has closed its disks and exited.
///
/// If it is still closing them, a second request to end does no harm.
const SHUT_DOWN_WAIT: Duration = Duration::from_secs(2);

/// QEMU ended for an unknown reason.
pub(super) const WITHOUT_A_WORD: &str = "QEMU exited without giving a reason";

/// The end of a guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShutDown {
    pub(super) how: &'static str,
    /// When QEMU reported it.
    pub(super) at: Instant,
    /// QEMU keeps the stopped VM, as with `-no-shutdown`; otherwise QEMU ends.
    is_kept: bool,
}

impl ShutDown {
    fn reported(event: &Event) -> Self {
        let how = match event.data["reason"].as_str() {
            Some("guest-shutdown") => "the guest shut down",
            Some("guest-reset") => "the guest rebooted, and QEMU has -no-reboot",
            Some("guest-panic") => "the guest's kernel crashed",
            Some("host-signal") => "QEMU was ended by a signal",
            Some("host-qmp-quit") => "QEMU received the command to quit",
            _ => WITHOUT_A_WORD,
        };
        Self { how, at: event.at, is_kept: false }
    }

    /// Whether QEMU is to be sent a signal.
    ///
    /// An ending QEMU that does not answer may wait for ever for its QMP monitor, after it has
    /// closed all disks (10.0 does, if a command arrives just then). A signal that it handles wakes
    /// it up.
    pub(super) fn needs_a_signal(self) -> bool {
        !self.is_kept && self.at.elapsed() > SHUT_DOWN_WAIT
    }
}

/// QEMU's events about the end of its guest.
///
/// STOPs have a receiver of their own: a program that pauses the VM again and again causes many.
/// If the status is not queried meanwhile, they overflow the receiver, which is lost then. A common
/// one would be lost to SHUTDOWNs too.
#[derive(Debug)]
pub(super) struct Ends {
    shutdowns: Receiver<Event>,
    stops: Receiver<Event>,
}

impl Ends {
    pub(super) fn of(qmp: &Qmp) -> Self {
        Self { shutdowns: qmp.events_named(&["SHUTDOWN"]), stops: stops(qmp) }
    }

    /// The guest's end, after the events since the last call.
    ///
    /// `stops_again` replaces the receiver of STOPs if it is lost; none if the connection has
    /// ended.
    pub(super) fn receive(
        &mut self,
        before: Option<ShutDown>,
        stops_again: impl FnOnce() -> Option<Receiver<Event>>,
    ) -> Option<ShutDown> {
        // First, because QEMU reports a SHUTDOWN before its STOP: if that STOP is found here, its
        // SHUTDOWN is found below.
        let mut last_stop = None;
        let is_lost = loop {
            match self.stops.try_recv() {
                Ok(stop) => last_stop = Some(stop.at),
                Err(TryRecvError::Empty) => break false,
                Err(TryRecvError::Disconnected) => break true,
            }
        };
        let mut may_be_kept = false;
        if is_lost && let Some(stops) = stops_again() {
            // The STOP of this SHUTDOWN may be among the lost ones, and a QEMU that keeps its VM
            // must not be sent a signal.
            (self.stops, may_be_kept) = (stops, true);
        }
        let reported = self.shutdowns.try_iter().last();
        let shut_down = reported.as_ref().map(ShutDown::reported).or(before)?;
        let is_stopped = last_stop.is_some_and(|at| at >= shut_down.at);
        let is_kept = shut_down.is_kept || is_stopped || may_be_kept;
        Some(ShutDown { is_kept, ..shut_down })
    }
}

/// STOPs from now on.
pub(super) fn stops(qmp: &Qmp) -> Receiver<Event> {
    qmp.events_named(&["STOP"])
}

#[cfg(test)]
mod tests {
    use api::VmStatus;
    use crossbeam_channel::{Sender, unbounded};
    use serde_json::json;

    use super::super::Known;
    use super::super::alive::Qemu;
    use super::*;

    /// The events of a QEMU.
    struct Played {
        shutdowns: Sender<Event>,
        stops: Sender<Event>,
        ends: Ends,
    }

    impl Played {
        fn new() -> Self {
            let (to_shutdowns, shutdowns) = unbounded();
            let (to_stops, stops) = unbounded();
            Self { shutdowns: to_shutdowns, stops: to_stops, ends: Ends { shutdowns, stops } }
        }

        fn receive(&mut self, before: Option<ShutDown>) -> Option<ShutDown> {
            self.ends.receive(before, || panic!("it is connected"))
        }
    }

    fn event(name: &str, seconds_ago: u64) -> Event {
        let data = json!({ "guest": true, "reason": "guest-shutdown" });
        let at = Instant::now().checked_sub(Duration::from_secs(seconds_ago)).unwrap();
        Event { name: name.to_owned(), data, at }
    }

    fn shutdown(seconds_ago: u64) -> Event {
        event("SHUTDOWN", seconds_ago)
    }

    fn stop(seconds_ago: u64) -> Event {
        event("STOP", seconds_ago)
    }

    #[test]
    fn only_a_qemu_that_ends_is_sent_a_signal() {
        let mut qemu = Played::new();
        qemu.stops.send(stop(40)).unwrap();
        assert!(qemu.receive(None).is_none(), "its owner stopped it");
        qemu.shutdowns.send(shutdown(0)).unwrap();
        let started = qemu.receive(None).unwrap();
        assert!(!started.needs_a_signal(), "it has just started to end");
        qemu.stops.send(stop(31)).unwrap();
        qemu.shutdowns.send(shutdown(30)).unwrap();
        let ends = qemu.receive(Some(started)).unwrap();
        assert!(ends.needs_a_signal(), "the stop was before");
        assert!(qemu.receive(Some(ends)).unwrap().needs_a_signal());
        qemu.stops.send(stop(29)).unwrap();
        let kept = qemu.receive(Some(ends)).unwrap();
        assert!(!kept.needs_a_signal(), "it was told to keep it");
        assert!(!qemu.receive(Some(kept)).unwrap().needs_a_signal());
        assert_eq!(kept.how, "the guest shut down");
    }

    #[test]
    fn lost_stops_don_t_make_it_deaf() {
        let mut qemu = Played::new();
        let (again, stops) = unbounded();
        // As the reader does with a receiver that is full.
        qemu.stops = again;
        qemu.shutdowns.send(shutdown(30)).unwrap();
        let unsure = qemu.ends.receive(None, || Some(stops)).unwrap();
        assert_eq!(unsure.how, "the guest shut down");
        assert!(!unsure.needs_a_signal(), "its stop may be lost");
        qemu.shutdowns.send(shutdown(20)).unwrap();
        assert!(qemu.receive(Some(unsure)).unwrap().needs_a_signal());
        qemu.stops.send(stop(19)).unwrap();
        qemu.shutdowns.send(shutdown(20)).unwrap();
        assert!(!qemu.receive(None).unwrap().needs_a_signal(), "stops are received again");
    }

    #[test]
    fn the_end_is_heard_when_the_connection_has_ended() {
        let Played { shutdowns, stops, mut ends } = Played::new();
        drop(stops);
        shutdowns.send(shutdown(30)).unwrap();
        drop(shutdowns);
        let received = ends.receive(None, || None).unwrap();
        assert_eq!(received.how, "the guest shut down");
        assert!(ends.receive(Some(received), || None).is_some());
    }
    /// The thread that queried it had to wait while others were answered.
    #[test]
    fn an_old_answer_hides_no_end() {
        let asked = Instant::now();
        let why = String::new();
        let dead = Qemu::Dead { pid: 0, version: why.clone(), argv: vec![], attached: false, why };
        let mut known = Known::new(dead, VmStatus::Running);
        let mut played = Played::new();
        played.shutdowns.send(shutdown(0)).unwrap();
        known.shut_down = played.receive(None);
        known.answered(asked, VmStatus::Running);
        assert!(known.shut_down.is_some());
        known.answered(Instant::now(), VmStatus::Paused);
        known.answered(asked, VmStatus::Running);
        assert_eq!(known.status, VmStatus::Paused);
        // Its owner had it reset, and run.
        known.answered(Instant::now(), VmStatus::Running);
        assert!(known.shut_down.is_none() && known.status == VmStatus::Running);
    }
}
