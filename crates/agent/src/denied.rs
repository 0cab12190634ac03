//! Why the agent doesn't do what it is asked, for the person who asked.

use api::ErrorCode;
use qemu::machine::StartError;

/// By who has to act; the text says what to do. Programs that have to tell more apart
/// than that find it in the code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Denied {
    /// What was asked makes no sense.
    #[error("{0}")]
    Asked(String),
    /// Whoever asks may not.
    #[error("{0}")]
    Forbidden(String),
    /// Not now, or not any more.
    #[error("{0}")]
    Conflict(String),
    /// QEMU does not go along.
    #[error("{0}")]
    Qemu(String),
    /// This host lacks something.
    #[error("{0}")]
    Local(String),
    /// One of those, of which the code says more.
    #[error("{1}")]
    Coded(ErrorCode, String),
    /// The agent is ending.
    #[error("the agent is stopping: ask again when it runs again")]
    Closing,
}

impl Denied {
    /// What it is for a program.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::Asked(_) => ErrorCode::InvalidRequest,
            Self::Forbidden(_) => ErrorCode::Forbidden,
            Self::Conflict(_) => ErrorCode::Conflict,
            Self::Qemu(_) => ErrorCode::QemuFailed,
            Self::Local(_) => ErrorCode::HostFailed,
            Self::Coded(code, _) => *code,
            Self::Closing => ErrorCode::AgentStopping,
        }
    }
}

impl From<crate::name::NameError> for Denied {
    fn from(error: crate::name::NameError) -> Self {
        Self::Asked(error.to_string())
    }
}

impl From<StartError> for Denied {
    fn from(error: StartError) -> Self {
        let text = error.to_string();
        match error {
            StartError::CommandLine(_) => Self::Asked(text),
            StartError::Ended { .. } | StartError::Qmp(_) | StartError::Launch(_) => {
                Self::Qemu(text)
            }
            StartError::Directory { .. }
            | StartError::Socket { .. }
            | StartError::Hidden { .. }
            | StartError::Process(_) => Self::Local(text),
        }
    }
}
