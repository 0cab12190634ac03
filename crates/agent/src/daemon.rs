//! The agent's start, service and shutdown, step by step. Each step takes what the one before
//! returned, so that none can come too early.

mod error;
mod found;
mod log;
mod open;
mod process;
mod rack;
mod renewal;
mod reserved;
mod service;
mod service_manager;
mod settling;
mod this_host;

use crate::config::{Config, Settings};
pub use error::AgentError;
use error::local_error;
use process::Process;

/// Runs an agent until a signal ends it; VMs keep running.
///
/// # Errors
/// If it can't start, in words for the operator.
pub fn run(settings: Settings) -> Result<(), AgentError> {
    let process = Process::prepare()?;
    let config = Config::new(settings)?;
    // Until this function returns.
    let _log = log::begin().map_err(|source| local_error("starting the log", source))?;
    process.configure(config).reserve()?.find_vms()?.settle()?.open()?.serve()
}
