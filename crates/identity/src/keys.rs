//! New keys and tickets of an established connection, which rustls still makes.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;

use crate::record::{RecordError, TrafficKey};

/// One end's key schedule.
pub(crate) trait Schedule: Send {
    /// The next key for what we write.
    fn next_to_seal(&mut self) -> Result<TrafficKey, RecordError>;
    /// The next key for what we read.
    fn next_to_open(&mut self) -> Result<TrafficKey, RecordError>;
    /// Keeps a ticket, with which the next connection to this peer is cheaper.
    fn ticket(&mut self, message: &[u8]) -> Result<(), RecordError>;
}

const NO_NEXT: RecordError = RecordError::Key("there is no next one");

impl Schedule for KernelConnection<ClientConnectionData> {
    fn next_to_seal(&mut self) -> Result<TrafficKey, RecordError> {
        TrafficKey::new(self.update_tx_secret().map_err(|_| NO_NEXT)?)
    }

    fn next_to_open(&mut self) -> Result<TrafficKey, RecordError> {
        TrafficKey::new(self.update_rx_secret().map_err(|_| NO_NEXT)?)
    }

    fn ticket(&mut self, message: &[u8]) -> Result<(), RecordError> {
        self.handle_new_session_ticket(message).map_err(|_| RecordError::Message)
    }
}

impl Schedule for KernelConnection<ServerConnectionData> {
    fn next_to_seal(&mut self) -> Result<TrafficKey, RecordError> {
        TrafficKey::new(self.update_tx_secret().map_err(|_| NO_NEXT)?)
    }

    fn next_to_open(&mut self) -> Result<TrafficKey, RecordError> {
        TrafficKey::new(self.update_rx_secret().map_err(|_| NO_NEXT)?)
    }

    /// Only a server gives tickets.
    fn ticket(&mut self, _: &[u8]) -> Result<(), RecordError> {
        Err(RecordError::Message)
    }
}

/// The state that reader and writer of one connection share. They need it once in some
/// hundred GiB, and otherwise work independently.
pub(crate) struct Keys {
    schedule: Mutex<Box<dyn Schedule>>,
    /// The peer has asked for a new key for what we write.
    is_update_asked: AtomicBool,
}

impl Keys {
    pub(crate) fn new(schedule: Box<dyn Schedule>) -> Self {
        Self { schedule: Mutex::new(schedule), is_update_asked: AtomicBool::new(false) }
    }

    pub(crate) fn schedule(&self) -> parking_lot::MutexGuard<'_, Box<dyn Schedule>> {
        self.schedule.lock()
    }

    pub(crate) fn ask_update(&self) {
        self.is_update_asked.store(true, Relaxed);
    }

    /// Whether the peer has asked for a new key since the last call.
    pub(crate) fn is_update_asked(&self) -> bool {
        self.is_update_asked.load(Relaxed) && self.is_update_asked.swap(false, Relaxed)
    }
}
