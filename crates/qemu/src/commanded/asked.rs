//! Speaking with the helper in its guest: with one migration at a time nobody else of this
//! agent does.

use std::time::Duration;

use cachemap::Limits;

use super::Commanded;
use crate::guest_memory::GuestMemory;
use crate::guest_port::{self, GuestError, HasGuest, OpenPort};

impl HasGuest for Commanded {
    fn open_guest_port(&self, _: Duration) -> Result<OpenPort<'_>, GuestError> {
        let socket = self.guest_port()?;
        // Nobody says whether it is taken: then it is not answered.
        Ok(OpenPort { stream: guest_port::connect(&socket)?, taken: true, _turn: None })
    }

    fn guest_limits(&self) -> Result<Limits, String> {
        Ok(guest_port::limits(self.memory()?.bytes()))
    }

    fn guest_memory(&self, blocks: &[(&str, u64)]) -> Result<GuestMemory, String> {
        Ok(GuestMemory::of_pc(&self.memory()?, blocks.iter().copied()))
    }

    fn is_here(&self) -> bool {
        self.process.is_alive()
    }
}
