//! Errors of a migration that ended without its VM at the destination.

use std::io;
use std::time::Duration;

use identity::HandshakeError;
use qemu::command_line::CommandLineError;
use qemu::disks::ChoiceError;
use qemu::lost_writes;
use qemu::mirror::MirrorError;
use qemu::qmp::QmpError;
use qemu::rendezvous::RendezvousError;
use tap::TapError;
use transport::{LaneError, LanesError};
use wire::WireError;
use xen::StreamError;

use crate::resources::BuffersFull;

/// Why a migration failed, by who has to act. After all but [`MigrationError::InDoubt`],
/// [`MigrationError::VmGone`] and [`MigrationError::PoweredOff`] the VM goes on at its source.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// The operator cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The destination does not take the VM.
    #[error("{host} refuses the VM: {reason}")]
    Refused {
        /// The destination.
        host: String,
        /// Its reason.
        reason: String,
    },
    /// The destination failed before the commit.
    #[error("{host} ended the migration: {reason}")]
    DestinationFailed {
        /// The destination.
        host: String,
        /// Its reason.
        reason: String,
    },
    /// Too many migrations at the same time.
    #[error("it cannot leave this host now: {0}")]
    Buffers(#[from] BuffersFull),
    /// No control connection could be made.
    #[error("the agent of {host} can't be reached: {source}")]
    Unreached {
        /// The destination.
        host: String,
        /// Why not.
        source: Box<LaneError>,
    },
    /// The agents don't trust one another, so there is no control connection.
    #[error("there is no secure connection to the agent of {host}: {source}")]
    Insecure {
        /// The destination.
        host: String,
        /// Why not, and what to do.
        source: Box<HandshakeError>,
    },
    /// The control connection was lost.
    #[error("lost the connection to the agent of {host}: {why}")]
    PeerLost {
        /// The destination.
        host: String,
        /// Why it was lost.
        why: String,
    },
    /// The lanes failed.
    #[error("the data connections to {host} failed: {source}")]
    Lanes {
        /// The destination.
        host: String,
        /// Why they failed.
        source: LanesError,
    },
    /// A thread of this agent panicked.
    #[error("a fault in the agent: its thread {thread} panicked; see the agent's log")]
    Panicked {
        /// The thread's name.
        thread: String,
    },
    /// QEMU's stream can't be read.
    #[error("reading QEMU's migration stream: {0}")]
    Tap(#[source] TapError),
    /// The connections of a stream that is carried are not those of one migration, or don't go on.
    #[error("reading QEMU's migration stream: {0}")]
    Connections(String),
    /// A stream that is carried has what can't be split, and the next one would have it too.
    #[error("reading QEMU's migration stream: {0}")]
    Unsplittable(#[source] TapError),
    /// The same, found when it was too late to relay it.
    #[error("reading QEMU's migration stream: QEMU sent a page after it had ended its RAM")]
    PageAfterRam,
    /// The disks can't be moved.
    #[error("moving the VM's disks: {0}")]
    Disks(String),
    /// The disks can't be moved as the operator chose.
    #[error("moving the VM's disks: {0}")]
    DiskChoice(#[from] ChoiceError),
    /// The disks can't be mirrored.
    #[error("moving the VM's disks: {0}")]
    Mirrors(#[source] Box<MirrorError>),
    /// The source's QEMU refuses or fails.
    #[error("the source's QEMU: {0}")]
    Qemu(String),
    /// It does not do what QMP requests.
    #[error("the source's QEMU: {0}")]
    Qmp(#[source] QmpError),
    /// It can't be given a socket.
    #[error("the source's QEMU: {0}")]
    Rendezvous(#[from] RendezvousError),
    /// Its command line can't be changed as the operator wants.
    #[error("the source's QEMU: {0}")]
    CommandLine(#[from] CommandLineError),
    /// The xl that migrates a domain fails, or writes what can't be read.
    #[error("the source's xl: {0}")]
    Xl(String),
    /// The guest powered off and QEMU ended with it, or QEMU died.
    #[error("the VM ended while it was being moved: {0}")]
    VmGone(String),
    /// The guest powered off, or ended otherwise, and QEMU keeps the VM.
    #[error("{0} while the VM was being moved; its QEMU keeps it (-no-shutdown)")]
    PoweredOff(&'static str),
    /// The VM's fate can't be known, or decided, at the moment.
    #[error("{0}")]
    InDoubt(String),
    /// No data arrives at the destination.
    #[error(
        "nothing of the VM has arrived at {host} for {} s; `stall` under [waits] in the agent's \
         file is that limit", waited.as_secs()
    )]
    Stalled {
        /// The destination.
        host: String,
        /// How long no data has arrived.
        waited: Duration,
    },
    /// QEMU hands over no data, and all that it did has arrived.
    #[error(
        "the source's QEMU has handed over no data for {} s, and what it did has arrived: it may \
         hang in its migration; `stall` under [waits] in the agent's file is that limit",
        waited.as_secs()
    )]
    QemuSilent {
        /// How long it has been silent.
        waited: Duration,
    },
    /// The destination does not flush the disks, and nothing else is on its way.
    #[error(
        "the VM's disks at {host} were not flushed within {} s, and what QEMU handed over has \
         arrived: their storage may hang; `stall` under [waits] in the agent's file is that limit",
        waited.as_secs()
    )]
    DisksNotFlushed {
        /// The destination.
        host: String,
        /// How long a flush has taken.
        waited: Duration,
    },
    /// The VM was stopped for as long as permitted.
    #[error(
        "the VM had stood still for {:.1} s, the most that --blackout-max allows, and {left}. Try \
         again when {host} and the network to it have less to do, or allow more; by default it is \
         ten times --downtime-ms, and {} s at least", allowed.as_secs_f64(), least.as_secs()
    )]
    Blackout {
        /// The destination.
        host: String,
        /// The permitted time.
        allowed: Duration,
        /// The shortest default.
        least: Duration,
        /// What the switchover was waiting for.
        left: String,
    },
    /// The operator's time limit has passed.
    #[error("it was not released within the {} s of --timeout", allowed.as_secs())]
    TooLong {
        /// That limit.
        allowed: Duration,
    },
    /// What arrived is not what QEMU handed over: a fault of Droveway's, or of a
    /// host's memory.
    #[error(
        "the audit found {pages} pages that are not at {host} as they were handed over \
         ({first}); please report this, with the migration's report"
    )]
    Audit {
        /// The destination.
        host: String,
        /// How many pages differ.
        pages: u64,
        /// The first one.
        first: String,
    },
    /// QEMU loses what the guest writes meanwhile, and the operator has not accepted that.
    #[error(
        "{}: restart the VM with QEMU 9.0 or newer, or with KVM. --accept-lost-writes moves it \
         anyway",
        lost_writes::WHY
    )]
    LosesWrites,
    /// The guest writes too fast.
    #[error("{0}")]
    NotFollowed(String),
    /// This host can't continue it.
    #[error("{0}")]
    Ended(String),
    /// A resource of this host is missing.
    #[error("{what}: {source}")]
    Local {
        /// The operation that failed.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

impl MigrationError {
    /// The error if the agent of `host` is lost.
    pub(crate) fn lost(host: &str, why: impl std::fmt::Display) -> Self {
        Self::PeerLost { host: host.to_owned(), why: why.to_string() }
    }

    /// The error if there is no connection to the agent of `host`.
    pub(crate) fn unconnected(host: &str, error: LaneError) -> Self {
        let host = host.to_owned();
        match error {
            LaneError::Handshake { source, .. } => {
                Self::Insecure { host, source: Box::new(source) }
            }
            source => Self::Unreached { host, source: Box::new(source) },
        }
    }
}

impl From<QmpError> for MigrationError {
    fn from(error: QmpError) -> Self {
        match error {
            QmpError::Closed => Self::VmGone("its QEMU closed the QMP connection".to_owned()),
            error => Self::Qmp(error),
        }
    }
}

impl From<StreamError> for MigrationError {
    fn from(error: StreamError) -> Self {
        Self::Xl(error.to_string())
    }
}

/// Errors of a control connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// It broke, or the peer violated the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The peer closed it.
    #[error("it closed the connection")]
    Closed,
    /// The peer doesn't read.
    #[error("it is not reading from the connection")]
    Unread,
}
