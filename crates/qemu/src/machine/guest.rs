//! Communication with the helper in a VM's guest, by one thread at a time.

use std::time::{Duration, Instant};

use cachemap::Limits;

use super::Machine;
use crate::guest_memory::GuestMemory;
use crate::guest_port::{self, GuestError, HasGuest, OpenPort};
use crate::qmp::RunState;

impl HasGuest for Machine {
    fn open_guest_port(&self, within: Duration) -> Result<OpenPort<'_>, GuestError> {
        let end = Instant::now() + within;
        let turn = self.port_turn.try_lock_until(end).ok_or(GuestError::Taken)?;
        let left = end.saturating_duration_since(Instant::now());
        let port = guest_port::find(&self.qmp, left)?;
        if !port.open {
            return Err(GuestError::NobodyThere);
        }
        let stream = guest_port::connect(&self.cwd.join(&port.socket))?;
        Ok(OpenPort { stream, taken: port.taken, opened: true, _turn: Some(turn) })
    }

    fn guest_limits(&self) -> Result<Limits, String> {
        guest_port::limits_of(&self.qmp).map_err(|error| error.to_string())
    }

    fn guest_memory(&self, blocks: &[(&str, u64)]) -> Result<GuestMemory, String> {
        GuestMemory::of(&self.qmp, blocks.iter().copied()).map_err(|error| error.to_string())
    }

    fn is_here(&self) -> bool {
        self.qmp.run_state().is_ok_and(|state| state != RunState::PostMigrate)
    }
}
