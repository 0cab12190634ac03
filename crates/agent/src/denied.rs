//! Why the agent refuses a request.

use api::ErrorCode;
use qemu::command_line::CommandLineError;
use qemu::machine::StartError;

/// The reason of a refusal, by who has to act; the text says what to do.
///
/// The code tells programs more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Denied {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The caller is not permitted.
    #[error("{0}")]
    Forbidden(String),
    /// The present state forbids it.
    #[error("{0}")]
    Conflict(String),
    /// QEMU refused or failed.
    #[error("{0}")]
    Qemu(String),
    /// This host lacks or failed at something.
    #[error("{0}")]
    Local(String),
    /// Any of these, with a more specific code.
    #[error("{1}")]
    Coded(ErrorCode, String),
    /// The agent is stopping.
    #[error("the agent is stopping: try again when it runs")]
    Closing,
}

impl Denied {
    /// The code for programs.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid(_) => ErrorCode::InvalidRequest,
            Self::Forbidden(_) => ErrorCode::Forbidden,
            Self::Conflict(_) => ErrorCode::Conflict,
            Self::Qemu(_) => ErrorCode::QemuFailed,
            Self::Local(_) => ErrorCode::HostFailed,
            Self::Coded(code, _) => *code,
            Self::Closing => ErrorCode::AgentStopping,
        }
    }
}

impl From<identity::NameError> for Denied {
    fn from(error: identity::NameError) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl From<CommandLineError> for Denied {
    fn from(error: CommandLineError) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl From<StartError> for Denied {
    fn from(error: StartError) -> Self {
        let text = error.to_string();
        match error {
            StartError::CommandLine(_) | StartError::RamFiles { .. } => Self::Invalid(text),
            StartError::Ended { .. }
            | StartError::Silent { .. }
            | StartError::Qmp(_)
            | StartError::Launch(_) => Self::Qemu(text),
            StartError::Directory { .. }
            | StartError::Socket { .. }
            | StartError::RamFile { .. }
            | StartError::Hidden { .. }
            | StartError::Process(_) => Self::Local(text),
        }
    }
}
