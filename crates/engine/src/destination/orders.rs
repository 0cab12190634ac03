//! Orders of another agent that moves several VMs, including some of this host.

use std::time::{Duration, Instant};

use identity::Connection;
use wire::{Frame, Order, gang, read_frame, read_message};

use super::greeting::{PREAMBLE_MAX, TurnedAway, check_name};
use crate::host::{Host, Refusal};

/// The longest time between two orders. An agent that follows a migration sends one every second.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Follows orders until the connection ends, or until an order comes from an agent that may give
/// none: that frees its place for others.
pub(super) fn obey(host: &dyn Host, connection: &mut Connection) -> Result<(), TurnedAway> {
    // A peer that connects must send its first order soon.
    let mut silence_max = PREAMBLE_MAX;
    loop {
        connection.set_read_deadline(Some(Instant::now() + silence_max))?;
        let Some(Frame::Message(json)) = read_frame(connection)? else { return Ok(()) };
        let order: Order = read_message(&json)?;
        check_name(connection, &order.from)?;
        match host.obey(&order.from, &order.order) {
            Ok(answer) => Frame::message(&answer)?.write_to(connection)?,
            Err(Refusal(reason)) => {
                let refused = gang::Answer::Refused { reason, is_stopping: false };
                Frame::message(&refused)?.write_to(connection)?;
                return Ok(());
            }
        }
        silence_max = SILENCE_MAX;
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use qemu::disks::GoesOn;
    use switchover::MigrationId;
    use wire::{Inquiry, Part, Prepare, SwitchoverMessage};

    use super::*;
    use crate::host::{Arriving, Unsettled};

    /// Accepts orders from host-a only.
    struct Picky;

    impl Host for Picky {
        fn receive(&self, _: &Prepare, _: GoesOn<'_>) -> Result<Box<dyn Arriving>, Refusal> {
            unreachable!()
        }

        fn settle(&self, _: Unsettled) {
            unreachable!()
        }

        fn take_up(&self, _: &str, _: &MigrationId) -> bool {
            unreachable!()
        }

        fn answer(&self, _: Inquiry) -> Option<SwitchoverMessage> {
            unreachable!()
        }

        fn admits(&self, _: &str) -> bool {
            unreachable!()
        }

        fn obey(&self, from: &str, _: &Part<gang::Order>) -> Result<gang::Answer, Refusal> {
            match from {
                "host-a" => {
                    let reason = "not that VM".to_owned();
                    Ok(gang::Answer::Refused { reason, is_stopping: false })
                }
                _ => Err(Refusal(format!("not {from}"))),
            }
        }
    }

    /// Sends an order, and returns the answer.
    fn ask(connection: &mut Connection, from: &str) -> gang::Answer {
        let order = gang::Order::Cancel { migration: "0a0b0c0d".to_owned() };
        let order = Order { from: from.to_owned(), order: order.into() };
        Frame::message(&order).unwrap().write_to(connection).unwrap();
        match read_frame(connection).unwrap() {
            Some(Frame::Message(json)) => read_message(&json).unwrap(),
            _ => panic!("no answer"),
        }
    }

    #[test]
    fn a_peer_without_permission_is_told_why_and_loses_its_place() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut there = Connection::plain(listener.accept().unwrap().0);
        let mut here = Connection::plain(stream);
        let obeying =
            thread::spawn(move || obey(&Picky, &mut there).map_err(|error| error.to_string()));
        for (from, says) in
            [("host-a", "not that VM"), ("host-a", "not that VM"), ("host-c", "not host-c")]
        {
            match ask(&mut here, from) {
                gang::Answer::Refused { reason, .. } => assert_eq!(reason, says),
                other => panic!("{other:?}"),
            }
        }
        // The peer has not closed the connection.
        assert_eq!(obeying.join().unwrap(), Ok(()));
    }
}
