//! From a loaded VM to its fate: follows the source's messages until it is decided.

use std::time::Duration;

use crossbeam_channel::RecvTimeoutError;
use switchover::Wait;
use switchover::destination::{Driver, Event as Step};
use wire::ToDestination;

use super::connect::Connected;
use super::effects::Keeper;
use crate::link::Received;

/// The time limit for the source's next message, as long as there is a connection: the source first
/// waits for QEMU's report of how its migration ended, or for QEMU's end.
const WORD_MAX: Duration = Duration::from_secs(5);
/// The interval between retries after a failure.
const RETRY: Duration = Duration::from_secs(1);

impl Connected<'_> {
    /// Follows the source until the switchover has ended on this side, or the connection is lost.
    pub(super) fn see_it_through(&self, driver: &mut Driver, keeper: &mut Keeper) {
        while let Some(wait) = driver.machine().wait() {
            let event = match self.next_step(wait) {
                Some(Step::Timeout) if !keeper.machine().process.is_alive() => Step::QemuExited,
                Some(event) => event,
                None => return,
            };
            driver.step(event, keeper);
        }
    }

    /// The next event of the switchover; none without a connection.
    pub(super) fn next_step(&self, wait: Wait) -> Option<Step> {
        let limit = if wait == Wait::Retry { RETRY } else { WORD_MAX };
        loop {
            return Some(match self.receive_within(limit) {
                Ok(Received::Message(ToDestination::Switchover { said })) => Step::Received(said),
                Ok(Received::Disconnected(error)) => {
                    Step::ConnectionLost { reason: error.to_string().into() }
                }
                Ok(_) => continue,
                Err(RecvTimeoutError::Timeout) => Step::Timeout,
                Err(RecvTimeoutError::Disconnected) => return None,
            });
        }
    }
}
