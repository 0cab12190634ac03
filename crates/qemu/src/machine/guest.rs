//! Speaking with the helper in a VM's guest, one at a time.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use cachemap::{Budget, CacheMap, Greeting, Limits, Summary};
use parking_lot::MutexGuard;

use super::Machine;
use crate::guest_port::{self, GuestError, Patience};

/// The port for the helper in a VM's guest, and nobody else of this agent at it.
#[derive(Debug)]
pub struct OpenPort<'a> {
    /// What leads there; another thread may shut a clone of it down.
    pub stream: UnixStream,
    /// Somebody had it before us.
    taken: bool,
    _turn: MutexGuard<'a, ()>,
}

impl Machine {
    /// Opens the port for the helper in the guest, whoever made it, once nobody
    /// else of this agent speaks there.
    ///
    /// # Errors
    /// If there is none, no program in the guest has it open, or it isn't our turn
    /// within that time.
    pub fn open_guest_port(&self, within: Duration) -> Result<OpenPort<'_>, GuestError> {
        let end = Instant::now() + within;
        let turn = self.port_turn.try_lock_until(end).ok_or(GuestError::Taken)?;
        let left = end.saturating_duration_since(Instant::now());
        let port = guest_port::find(&self.qmp, left)?;
        if !port.open {
            return Err(GuestError::NobodyThere);
        }
        let stream = guest_port::connect(&self.cwd.join(&port.socket))?;
        Ok(OpenPort { stream, taken: port.taken, _turn: turn })
    }
}

impl OpenPort<'_> {
    /// Asks whether there is a helper.
    ///
    /// # Errors
    /// As [`guest_port::greet`].
    pub fn greet(&self, greeting: Duration) -> Result<Greeting, GuestError> {
        guest_port::greet(&self.stream, greeting).map_err(|error| self.explained(error))
    }

    /// Asks for the map.
    ///
    /// # Errors
    /// As [`guest_port::ask`].
    pub fn ask(
        &self,
        limits: Limits,
        budget: Budget,
        patience: Patience,
    ) -> Result<CacheMap, GuestError> {
        let map = guest_port::ask(&self.stream, limits, budget, patience);
        map.map_err(|error| self.explained(error))
    }

    /// Asks for the map, in parts as they are heard.
    ///
    /// # Errors
    /// As [`guest_port::ask_in_parts`].
    pub fn ask_in_parts(
        &self,
        limits: Limits,
        budget: Budget,
        patience: Patience,
        part: &mut dyn FnMut(CacheMap),
    ) -> Result<Summary, GuestError> {
        let heard = guest_port::ask_in_parts(&self.stream, limits, budget, patience, part);
        heard.map_err(|error| self.explained(error))
    }

    /// Nobody answers somebody who is not served.
    fn explained(&self, error: GuestError) -> GuestError {
        match error {
            GuestError::Absent { .. } if self.taken => GuestError::Taken,
            error => error,
        }
    }
}
