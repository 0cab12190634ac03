//! The helper's port of a VM, found over QMP or from QEMU's command line.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use cachemap::{Budget, CacheMap, Greeting, Limits, Summary};
use parking_lot::MutexGuard;

use super::{GuestError, Patience};
use crate::guest_memory::GuestMemory;

/// A VM whose guest's helper can be queried.
pub trait HasGuest: Send + Sync {
    /// Opens the port for the helper in the guest, once no other thread of this
    /// agent uses it.
    ///
    /// # Errors
    /// If there is none, no program in the guest has it open, or another thread uses it
    /// for longer than that time.
    fn open_guest_port(&self, within: Duration) -> Result<OpenPort<'_>, GuestError>;

    /// The bounds of the pages that its helper can name.
    ///
    /// # Errors
    /// Why that isn't known.
    fn guest_limits(&self) -> Result<Limits, String>;

    /// Where its memory is in these blocks.
    ///
    /// # Errors
    /// Why that isn't known.
    fn guest_memory(&self, blocks: &[(&str, u64)]) -> Result<GuestMemory, String>;

    /// Whether the VM is still on this host. If not, its helper isn't, either.
    fn is_here(&self) -> bool;
}

/// The port for the helper in a VM's guest, which no other thread of this agent uses.
#[derive(Debug)]
pub struct OpenPort<'a> {
    /// The connection to it; another thread may shut down a clone of it.
    pub stream: UnixStream,
    /// Another client had, or may have had, the port before.
    pub(crate) taken: bool,
    /// A program in the guest is known to have it open.
    pub(crate) opened: bool,
    pub(crate) _turn: Option<MutexGuard<'a, ()>>,
}

impl OpenPort<'_> {
    /// Asks whether there is a helper.
    ///
    /// # Errors
    /// As [`super::greet`].
    pub fn greet(&self, greeting: Duration) -> Result<Greeting, GuestError> {
        super::greet(&self.stream, greeting).map_err(|error| self.explained(error))
    }

    /// Asks for the map.
    ///
    /// # Errors
    /// As [`super::query`].
    pub fn query(
        &self,
        limits: Limits,
        budget: Budget,
        patience: Patience,
    ) -> Result<CacheMap, GuestError> {
        let map = super::query(&self.stream, limits, budget, patience);
        map.map_err(|error| self.explained(error))
    }

    /// Asks for the map, in parts as they are received.
    ///
    /// # Errors
    /// As [`super::query_in_parts`].
    pub fn query_in_parts(
        &self,
        limits: Limits,
        budget: Budget,
        patience: Patience,
        part: &mut dyn FnMut(CacheMap),
    ) -> Result<Summary, GuestError> {
        let heard = super::query_in_parts(&self.stream, limits, budget, patience, part);
        heard.map_err(|error| self.explained(error))
    }

    /// Explains a missing answer: QEMU serves one client at a time, and a second one
    /// gets none; and a helper that has the port open runs.
    fn explained(&self, error: GuestError) -> GuestError {
        match error {
            GuestError::Absent { .. } if self.taken => GuestError::Taken,
            GuestError::Absent { waited } if self.opened => GuestError::Busy { waited },
            error => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_helper_that_has_the_port_open_is_not_said_to_be_missing() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let port = |taken, opened| {
            let stream = ours.try_clone().unwrap();
            OpenPort { stream, taken, opened, _turn: None }
        };
        let greeted = |port: OpenPort<'_>| port.greet(Duration::from_millis(20)).unwrap_err();
        let busy = greeted(port(false, true)).to_string();
        assert!(busy.ends_with("its guest is busy, or it hangs"), "{busy}");
        assert!(matches!(greeted(port(true, true)), GuestError::Taken));
        assert!(matches!(greeted(port(false, false)), GuestError::Absent { .. }));
    }
}
