//! Orders of another agent that moves several VMs, some of them from this host.

use std::time::{Duration, Instant};

use identity::Connection;
use wire::{Frame, Order, read_frame, read_message};

use super::{Shared, TurnedAway, check_name};

/// Between two orders. An agent that follows a migration asks every second.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Follows one after the other, until the connection ends.
pub(super) fn obey(shared: &Shared, connection: &mut Connection) -> Result<(), TurnedAway> {
    loop {
        connection.set_read_deadline(Some(Instant::now() + SILENCE_MAX))?;
        let Some(Frame::Message(json)) = read_frame(connection)? else { return Ok(()) };
        let order: Order = read_message(&json)?;
        check_name(connection, &order.from)?;
        let answer = shared.host.obey(&order.from, &order.order);
        Frame::message(&answer)?.write_to(connection)?;
    }
}
