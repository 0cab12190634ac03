//! The control connection, which needs neither a VM nor a journal.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;
use transport::{Endpoint, connect};
use wire::{Kind, ToDestination, ToSource};

use super::context::no_thread;
use super::control_writer::ControlWriter;
use super::disks::room::DiskRoom;
use crate::error::MigrationError;
use crate::host::{Local, Peer};
use crate::link::{Link, Received};

/// Time for a destination that reads to accept what is sent to it. The VM may be
/// stopped meanwhile.
const SAID_MAX: Duration = Duration::from_millis(20);

/// The control connection. Dropping it closes it.
pub(crate) struct Control {
    host: String,
    /// Used by threads that may wait for the peer.
    pub(crate) link: Arc<Link<ToDestination>>,
    /// Used by the leading thread, which must not wait.
    writer: ControlWriter,
    pub(crate) inbox: Receiver<Received<ToSource>>,
    pub(crate) disk_room: Arc<DiskRoom>,
}

/// What is sent on a new control connection, what comes, and the room for blocks that the
/// destination reports on it.
type Opened = (Arc<Link<ToDestination>>, Receiver<Received<ToSource>>, Arc<DiskRoom>);

/// Opens a control connection to the agent of `peer`.
pub(crate) fn open(local: &Local, peer: &Peer) -> Result<Opened, MigrationError> {
    let endpoint = Endpoint { local: None, remote: peer.address };
    let connection = connect(endpoint, &peer.name, &local.security, Kind::Control)
        .map_err(|error| MigrationError::unconnected(&peer.name, error))?;
    let disk_room = Arc::<DiskRoom>::default();
    let room = Arc::clone(&disk_room);
    let (link, inbox) =
        Link::start_with(connection, &peer.name, move |message| room.receive(message))
            .map_err(|error| MigrationError::lost(&peer.name, error))?;
    Ok((Arc::new(link), inbox, disk_room))
}

impl Control {
    pub(crate) fn connect(local: &Local, peer: &Peer) -> Result<Self, MigrationError> {
        let (link, inbox, disk_room) = open(local, peer)?;
        let writer = ControlWriter::start(Arc::clone(&link), &peer.name).map_err(no_thread)?;
        Ok(Self { host: peer.name.clone(), link, writer, inbox, disk_room })
    }

    /// Sends without waiting for the destination, which may read slowly.
    pub(crate) fn send(&self, message: &ToDestination) -> Result<(), MigrationError> {
        self.writer.send(message).map_err(|error| MigrationError::lost(&self.host, error))
    }

    /// Closes the connection if a thread of the tap or a lane is blocked sending to
    /// a destination that doesn't read. Otherwise it stays open, to carry the reason
    /// why the migration ends.
    pub(crate) fn cut_if_stuck(&self) {
        self.link.cut_if_stuck(SAID_MAX);
    }
}
