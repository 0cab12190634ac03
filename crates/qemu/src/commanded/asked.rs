//! Communication with the helper in its guest. A VM has one migration at a time, so no other
//! thread of this agent uses the port.

use std::time::Duration;

use cachemap::Limits;

use super::words::Words;
use super::{Commanded, memory};
use crate::guest_memory::GuestMemory;
use crate::guest_port::{self, GuestError, HasGuest, OpenPort};

impl HasGuest for Commanded {
    fn open_guest_port(&self, _: Duration) -> Result<OpenPort<'_>, GuestError> {
        let socket = self.guest_port()?;
        // Whether another client has the port isn't known: if so, there is no answer.
        Ok(OpenPort {
            stream: guest_port::connect(&socket)?,
            taken: true,
            opened: false,
            _turn: None,
        })
    }

    fn guest_limits(&self) -> Result<Limits, String> {
        Ok(memory::limits(Words(&self.argv), self.memory()?.bytes()))
    }

    fn guest_memory(&self, blocks: &[(&str, u64)]) -> Result<GuestMemory, String> {
        Ok(GuestMemory::of_pc(&self.memory()?, blocks.iter().copied()))
    }

    fn is_here(&self) -> bool {
        self.process.is_alive()
    }
}
