//! `agent`: run this host's agent.

use std::path::PathBuf;
use std::process::ExitCode;

use agent::config::Settings;
use client::Problem;

/// Runs the agent until it is stopped.
pub(crate) fn run(
    mut settings: Settings,
    api: Option<PathBuf>,
    tls: Option<PathBuf>,
) -> Result<ExitCode, Problem> {
    (settings.api, settings.tls) = (api, tls);
    agent::run(settings)?;
    Ok(ExitCode::SUCCESS)
}
