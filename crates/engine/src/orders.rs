//! Orders to another agent to move VMs of its host: order after order on a connection of its own.

use std::time::{Duration, Instant};

use identity::Connection;
use transport::{Endpoint, connect};
use wire::{Frame, Kind, Order, WireError, gang, read_frame, read_message};

use crate::examine::ExamineError;
use crate::host::{Local, Peer};

/// A connection for orders to another agent.
#[derive(Debug)]
pub struct Orders {
    connection: Connection,
    from: String,
}

impl Orders {
    /// Connects.
    ///
    /// # Errors
    /// If the agent isn't there, or doesn't accept the connection.
    pub fn open(local: &Local, peer: &Peer) -> Result<Self, ExamineError> {
        let way = Endpoint { local: None, remote: peer.address };
        let connection = connect(way, &peer.name, &local.security, Kind::Orders)?;
        Ok(Self { connection, from: local.agent.clone() })
    }

    /// Sends an order and waits for its answer. After an error, the connection is unusable.
    ///
    /// # Errors
    /// If there is no answer `within` that time.
    pub fn give(
        &mut self,
        order: gang::Order,
        within: Duration,
    ) -> Result<gang::Answer, ExamineError> {
        let connection = &mut self.connection;
        connection.set_write_timeout(Some(within)).map_err(WireError::from)?;
        connection.set_read_deadline(Some(Instant::now() + within)).map_err(WireError::from)?;
        Frame::message(&Order { from: self.from.clone(), order: order.into() })?
            .write_to(connection)?;
        match read_frame(connection)?.ok_or(ExamineError::HungUp)? {
            Frame::Message(json) => Ok(read_message(&json)?),
            _ => Err(ExamineError::OutOfTurn),
        }
    }
}

impl Drop for Orders {
    fn drop(&mut self) {
        self.connection.close();
    }
}
