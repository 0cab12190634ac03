//! The helper's port of a VM, found over QMP or from QEMU's command line.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use cachemap::{Budget, CacheMap, Greeting, Limits, Summary};
use parking_lot::MutexGuard;

use super::{GuestError, Patience};
use crate::guest_memory::GuestMemory;

/// A VM whose guest's helper can be asked.
pub trait HasGuest: Send + Sync {
    /// Opens the port for the helper in the guest, once no other thread of this
    /// agent uses it.
    ///
    /// # Errors
    /// If there is none, no program in the guest has it open, or it isn't our turn
    /// within that time.
    fn open_guest_port(&self, within: Duration) -> Result<OpenPort<'_>, GuestError>;

    /// What its memory is, as far as a helper can name pages of it.
    ///
    /// # Errors
    /// Why that isn't known.
    fn guest_limits(&self) -> Result<Limits, String>;

    /// Where its memory is in these blocks.
    ///
    /// # Errors
    /// Why that isn't known.
    fn guest_memory(&self, blocks: &[(&str, u64)]) -> Result<GuestMemory, String>;

    /// Whether it has not gone. One that has takes its helper with it.
    fn is_here(&self) -> bool;
}

/// The port for the helper in a VM's guest, and nobody else of this agent at it.
#[derive(Debug)]
pub struct OpenPort<'a> {
    /// What leads there; another thread may shut a clone of it down.
    pub stream: UnixStream,
    /// Somebody had it before us.
    pub(crate) taken: bool,
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
    /// As [`super::ask`].
    pub fn ask(
        &self,
        limits: Limits,
        budget: Budget,
        patience: Patience,
    ) -> Result<CacheMap, GuestError> {
        let map = super::ask(&self.stream, limits, budget, patience);
        map.map_err(|error| self.explained(error))
    }

    /// Asks for the map, in parts as they are heard.
    ///
    /// # Errors
    /// As [`super::ask_in_parts`].
    pub fn ask_in_parts(
        &self,
        limits: Limits,
        budget: Budget,
        patience: Patience,
        part: &mut dyn FnMut(CacheMap),
    ) -> Result<Summary, GuestError> {
        let heard = super::ask_in_parts(&self.stream, limits, budget, patience, part);
        heard.map_err(|error| self.explained(error))
    }

    /// QEMU serves one client at a time: a second one gets no answer.
    fn explained(&self, error: GuestError) -> GuestError {
        match error {
            GuestError::Absent { .. } if self.taken => GuestError::Taken,
            error => error,
        }
    }
}
