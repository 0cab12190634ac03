//! From a loaded VM to one that runs here, or not: what the source says, until it is
//! decided.

use std::time::Duration;

use crossbeam_channel::RecvTimeoutError;
use switchover::Wait;
use switchover::destination::{Driver, Event as Step};
use wire::ToDestination;

use super::connect::Connected;
use super::effects::Keeper;
use crate::link::Heard;

/// For the source's next word, as long as there is a connection: it has QEMU
/// say first how its migration ended, or end.
const WORD_MAX: Duration = Duration::from_secs(5);
/// What went wrong just now is tried again after this.
const RETRY: Duration = Duration::from_secs(1);

impl Connected<'_> {
    /// Hears the source until the switchover is over on this side, or there is
    /// no connection to hear it by.
    pub(super) fn see_it_through(&self, driver: &mut Driver, keeper: &mut Keeper) {
        while let Some(wait) = driver.machine().wait() {
            let limit = if wait == Wait::Retry { RETRY } else { WORD_MAX };
            let event = match self.hear.recv_timeout(limit) {
                Ok(Heard::Message(ToDestination::Switchover { said })) => Step::Heard(said),
                Ok(Heard::Gone(error)) => Step::ConnectionLost { reason: error.to_string().into() },
                Ok(_) => continue,
                Err(RecvTimeoutError::Timeout) if keeper.machine().process.is_alive() => {
                    Step::Timeout
                }
                Err(RecvTimeoutError::Timeout) => Step::QemuGone,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            driver.step(event, keeper);
        }
    }
}
