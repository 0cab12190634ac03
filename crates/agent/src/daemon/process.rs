//! The process: what it needs before it has threads, and its configuration.

use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::error::{AgentError, local_error};
use crate::config::{Config, Password};

/// How long a thread for blocking work waits for more of it.
const THREADS_IDLE_MAX: Duration = Duration::from_millis(500);

/// The process, which may have threads from now on.
pub(super) struct Process {
    gives_back_memory: bool,
    runtime: Runtime,
    hangups: [Signal; 2],
}

/// The process of an agent that knows what it is to do.
pub(super) struct Configured {
    pub(super) runtime: Runtime,
    pub(super) hangups: [Signal; 2],
    pub(super) config: Config,
}

impl Process {
    pub(super) fn prepare() -> Result<Self, AgentError> {
        // Before there are threads.
        let gives_back_memory = page::give_back_freed_memory();
        // Early, because SIGHUP ends an agent that does not handle it.
        let (runtime, hangups) = runtime()?;
        Ok(Self { gives_back_memory, runtime, hangups })
    }

    /// Takes the configuration, and logs what an operator should know of it and of this process.
    pub(super) fn configure(self, config: Config) -> Configured {
        let Self { gives_back_memory, runtime, hangups } = self;
        for exposure in config.passwords.iter().filter_map(Password::exposure) {
            tracing::warn!("{exposure}");
        }
        if !gives_back_memory {
            tracing::warn!(
                "cannot make the C library release freed memory: the agent grows with each move"
            );
        }
        if let Err(error) = qemu::launch::raise_open_files() {
            tracing::warn!(
                %error,
                "cannot raise the limit of open files: set LimitNOFILE= in the unit"
            );
        }
        Configured { runtime, hangups, config }
    }
}

/// The runtime of the API, and two streams of SIGHUPs from now on: one for the peers file, one for
/// the certificate.
fn runtime() -> Result<(Runtime, [Signal; 2]), AgentError> {
    let starting = |source| local_error("starting the API", source);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("api")
        // Shorter than the period of `vms::logs`: idle threads take turns, so that its work would
        // keep as many of them as there ever were.
        .thread_keep_alive(THREADS_IDLE_MAX)
        .enable_all()
        .build()
        .map_err(starting)?;
    let within = runtime.enter();
    let hangup = || signal(SignalKind::hangup()).map_err(starting);
    let hangups = [hangup()?, hangup()?];
    drop(within);
    Ok((runtime, hangups))
}
