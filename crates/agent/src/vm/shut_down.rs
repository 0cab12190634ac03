//! The end of a guest, as its QEMU reports it.

use std::time::{Duration, Instant};

use qemu::qmp::Event;

/// After this, an ending QEMU has closed its disks and exited.
///
/// If it is still closing them, a second request to end does no harm.
const SHUT_DOWN_WAIT: Duration = Duration::from_secs(2);

/// QEMU ended for an unknown reason.
pub(super) const WITHOUT_A_WORD: &str = "QEMU ended without a word";

/// The end of a guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShutDown {
    pub(super) how: &'static str,
    /// When QEMU reported it.
    at: Instant,
    /// QEMU keeps the stopped VM, as with `-no-shutdown`; otherwise QEMU ends.
    is_kept: bool,
}

impl ShutDown {
    pub(super) fn after(before: Option<Self>, event: &Event) -> Option<Self> {
        if event.name == "STOP" {
            return before.map(|shut_down| Self { is_kept: true, ..shut_down });
        }
        let how = match event.data["reason"].as_str() {
            Some("guest-shutdown") => "the guest shut down",
            Some("guest-reset") => "the guest rebooted, and QEMU was told not to",
            Some("guest-panic") => "the guest's kernel crashed",
            Some("host-signal") => "QEMU was ended by a signal",
            Some("host-qmp-quit") => "QEMU was told to quit",
            _ => WITHOUT_A_WORD,
        };
        Some(Self { how, at: Instant::now(), is_kept: false })
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(name: &str, data: serde_json::Value) -> Event {
        Event { name: name.to_owned(), data, at: Instant::now(), happened: None }
    }

    #[test]
    fn only_a_qemu_that_ends_is_sent_a_signal() {
        let shutdown = event("SHUTDOWN", json!({ "guest": true, "reason": "guest-shutdown" }));
        let stop = event("STOP", json!({}));
        assert!(ShutDown::after(None, &stop).is_none(), "its owner stopped it");
        let ends = ShutDown::after(None, &shutdown).unwrap();
        assert!(!ends.needs_a_signal(), "it has just begun to end");
        let long_ago =
            ShutDown { at: Instant::now().checked_sub(SHUT_DOWN_WAIT * 2).unwrap(), ..ends };
        assert!(long_ago.needs_a_signal());
        let kept = ShutDown::after(Some(long_ago), &stop).unwrap();
        assert!(!kept.needs_a_signal(), "it was told to keep it");
        assert_eq!(kept.how, "the guest shut down");
    }
}
