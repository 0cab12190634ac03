//! Why a VM's next QEMU can't inherit what the former one has.

use std::path::PathBuf;

/// Why a VM's next QEMU can't inherit a socket, a tap, or a file with RAM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InheritError {
    /// QEMU has no such socket, or the agent may not take it.
    #[error(
        "the socket {at} can't be handed over: its QEMU, process {pid}, has none that listens \
         there, or the agent may not inspect that process"
    )]
    NotFound {
        /// Its path, or its port.
        at: String,
        /// QEMU's process.
        pid: u32,
    },
    /// QEMU has not mapped such a file, or the agent may not open it.
    #[error(
        "the file of its RAM {id} can't be handed over: its QEMU, process {pid}, has none open \
         that it maps as shared memory, or the agent may not inspect that process"
    )]
    NoRamFile {
        /// Its backend.
        id: String,
        /// QEMU's process.
        pid: u32,
    },
    /// A port of the guest gets one socket.
    #[error(
        "port {port} can't be handed over: its QEMU, process {pid}, listens there at several \
         addresses, as for `localhost`, and the next one would get one of them: name one \
         (`host=127.0.0.1`)"
    )]
    SeveralAddresses {
        /// The port.
        port: u16,
        /// QEMU's process.
        pid: u32,
    },
    /// A monitor's next socket can't be made.
    #[error("no other socket can be made next to that of the monitor, {}: {why}", path.display())]
    Monitor {
        /// The path of the present one.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// QEMU's open files can't be listed.
    #[error(
        "the PID file {} can't be handed over: the agent may not inspect its QEMU, process {pid}",
        path.display()
    )]
    PidFile {
        /// Its path.
        path: PathBuf,
        /// QEMU's process.
        pid: u32,
    },
    /// QEMU has no such tap, or the agent may not take it.
    #[error(
        "the tap {name} can't be handed over: its QEMU, process {pid}, has it not open, or with \
         another number of queues, or the agent may not inspect that process"
    )]
    NoTap {
        /// Its name.
        name: String,
        /// QEMU's process.
        pid: u32,
    },
    /// The agent is in another network.
    #[error(
        "the tap {name} is in another network namespace than the agent: another QEMU could not \
         get it"
    )]
    TapElsewhere {
        /// Its name.
        name: String,
    },
    /// A QEMU with an open file runs no script.
    #[error(
        "the next QEMU would not run {script} for the tap {name} when it ends: with downscript=no \
         nothing has to be run"
    )]
    TapScript {
        /// Its name.
        name: String,
        /// What is run.
        script: String,
    },
    /// Its bridge would forward nothing for a while.
    #[error(
        "the bridge of the tap {name} runs the spanning tree protocol, and would forward nothing \
         there for up to half a minute, as the tap is without a QEMU for a moment: switch the \
         protocol off at that bridge (`ip link set BRIDGE type bridge stp_state 0`)"
    )]
    TapSilent {
        /// Its name.
        name: String,
    },
    /// No tap for the next QEMU can be made, or a tap can't be examined.
    #[error("its taps can't be handed over: {why}")]
    NoOwnTap {
        /// The system's error.
        why: String,
    },
    /// QEMU has ended.
    #[error("its QEMU, process {pid}, has ended")]
    Exited {
        /// QEMU's process.
        pid: u32,
    },
}
