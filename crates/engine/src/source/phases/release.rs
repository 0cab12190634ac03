//! What QEMU has reported of the VM since it has sent all of it.

use qemu::qmp::Event;

/// Why a VM that was taken back is not given to the destination.
pub(super) const TAKEN_BACK: &str = "it was ordered to run the VM, which it had released already";

/// Whether QEMU has released the VM, by its events.
///
/// A QEMU that has exited can't be queried any more: only its events show whether it ran the VM
/// again before that. They are in order, and QEMU refuses to run a VM before its migration has
/// completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Release {
    /// It has not sent all of it yet.
    Awaited,
    /// Its migration has completed. It releases the VM a moment later, without an event.
    Reported,
    /// Then something else has ordered it to run the VM.
    TakenBack,
}

impl Release {
    /// The same after one more event.
    pub(super) fn after(self, event: &Event) -> Self {
        match (self, event.name.as_str(), event.data["status"].as_str()) {
            (Self::Awaited, "MIGRATION", Some("completed")) => Self::Reported,
            (Self::Reported, "RESUME", _) => Self::TakenBack,
            (now, ..) => now,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_vm_that_ran_after_the_end_of_its_migration_was_taken_back() {
        let event = |name: &str, data| Event { name: name.to_owned(), data, at: Instant::now() };
        let migration = |status: &str| event("MIGRATION", json!({ "status": status }));
        let (stop, resume) = (event("STOP", Value::Null), event("RESUME", Value::Null));
        let (device, completed) = (migration("device"), migration("completed"));
        for (events, expected) in [
            (vec![&stop, &device], Release::Awaited),
            // Its owner has paused it before.
            (vec![&stop, &resume, &stop, &device], Release::Awaited),
            (vec![&stop, &resume, &stop, &device, &completed], Release::Reported),
            (vec![&completed, &resume], Release::TakenBack),
            (vec![&completed, &resume, &stop], Release::TakenBack),
            (vec![&completed, &resume, &stop, &completed], Release::TakenBack),
        ] {
            let after = events.iter().fold(Release::Awaited, |now, event| now.after(event));
            assert_eq!(after, expected, "{events:?}");
        }
    }
}
