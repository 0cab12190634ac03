//! No migration, for comparison.

use std::time::{Duration, Instant};

use super::{Contender, Ground, Mode, Moved, Qemu};
use lab::error::Result;
use lab::guest::{Guest, GuestSpec};

/// Its name in tables.
pub const STAYS: &str = "stays";

/// A guest that stays where it is.
pub struct Stays(Qemu);

impl Default for Stays {
    fn default() -> Self {
        Self(Qemu::new(Mode::Precopy))
    }
}

impl Contender for Stays {
    fn name(&self) -> String {
        STAYS.to_owned()
    }

    fn start(&mut self, ground: &Ground<'_>, spec: &GuestSpec) -> Result<Guest> {
        self.0.start(ground, spec)
    }

    fn migrate(&mut self, _: &Ground<'_>) -> Result<Moved> {
        let now = Instant::now();
        let (prepare, downtime) = (Duration::ZERO, Duration::ZERO);
        Ok(Moved { began: now, ran: now, prepare, downtime, passes: None })
    }

    fn stop(&mut self) {
        self.0.stop();
    }
}
