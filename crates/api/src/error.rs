//! The body of every response that is not 2xx: a sentence for people, a code for programs.

use std::fmt;

use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

/// The body of every response that is not 2xx.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What went wrong and what to do, for a person; the wording may change between releases.
    pub error: String,
    /// The same for a program.
    ///
    /// None if the agent's release has no codes yet, or if this release doesn't know the code.
    #[serde(default, deserialize_with = "known")]
    pub code: Option<ErrorCode>,
}

/// What went wrong, for programs. A code keeps its meaning and its HTTP status in all
/// releases; later ones may have more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// Something in the request is wrong, and no other code is more specific.
    InvalidRequest,
    /// Several hosts have a VM of that name, and the request doesn't name the host.
    AmbiguousVm,
    /// The VM is already at its destination host.
    AlreadyThere,
    /// The VM's memory would cross the network unencrypted.
    NotEncrypted,
    /// A decision about a VM in doubt lacks the operator's confirmation.
    NotCertain,
    /// The caller's role does not permit it.
    Forbidden,
    /// The API has no such path.
    NoSuchPath,
    /// No VM has that name.
    NoSuchVm,
    /// No host has that name in the peers file.
    NoSuchHost,
    /// No migration of this host has that id.
    NoSuchMigration,
    /// No gang that this host coordinates has that id.
    NoSuchGang,
    /// The path exists, but not for this method.
    MethodNotAllowed,
    /// The present state forbids it, and no other code is more specific.
    Conflict,
    /// The name is taken, or the VM is adopted already.
    VmExists,
    /// The VM is starting, arriving, moving or being stopped.
    VmBusy,
    /// It is not decided which host the VM belongs to.
    VmInDoubt,
    /// It is already decided which host the VM belongs to.
    VmNotInDoubt,
    /// The agent can't tell whether it is decided which host the VM belongs to.
    DoubtUnknown,
    /// The agent's record of the VM can't be read.
    VmUnreadable,
    /// The VM's QEMU has ended.
    VmDead,
    /// The migration has not ended yet.
    MigrationRunning,
    /// The migration has ended.
    MigrationEnded,
    /// The migration is past the commit: the VM belongs to the destination host.
    MigrationCommitted,
    /// The gang has not ended yet.
    GangRunning,
    /// The gang has ended.
    GangEnded,
    /// The agent already coordinates as many gangs as it can.
    TooManyGangs,
    /// No host has enough memory for the VM.
    NoRoom,
    /// The agent of another host can't be reached.
    HostSilent,
    /// Something failed on this host: a file, a thread, a process.
    HostFailed,
    /// QEMU refused something, or can't be reached.
    QemuFailed,
    /// The agent already serves as many readers of events as it can.
    TooManyReaders,
    /// The agent already serves as many watchers of migrations and gangs as it can.
    TooManyWatchers,
    /// The agent already serves as many connections over TCP as it can, or as many of one person.
    TooManyConnections,
    /// The agent is stopping.
    AgentStopping,
}

impl ErrorCode {
    /// The HTTP status of responses with this code.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidRequest
            | Self::AmbiguousVm
            | Self::AlreadyThere
            | Self::NotEncrypted
            | Self::NotCertain => 400,
            Self::Forbidden => 403,
            Self::NoSuchPath
            | Self::NoSuchVm
            | Self::NoSuchHost
            | Self::NoSuchMigration
            | Self::NoSuchGang => 404,
            Self::MethodNotAllowed => 405,
            Self::Conflict
            | Self::VmExists
            | Self::VmBusy
            | Self::VmInDoubt
            | Self::VmNotInDoubt
            | Self::DoubtUnknown
            | Self::VmUnreadable
            | Self::VmDead
            | Self::MigrationRunning
            | Self::MigrationEnded
            | Self::MigrationCommitted
            | Self::GangRunning
            | Self::GangEnded
            | Self::TooManyGangs
            | Self::NoRoom
            | Self::HostSilent => 409,
            Self::HostFailed => 500,
            Self::QemuFailed => 502,
            Self::TooManyReaders
            | Self::TooManyWatchers
            | Self::TooManyConnections
            | Self::AgentStopping => 503,
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// None for the code of a newer release.
fn known<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ErrorCode>, D::Error> {
    let text = Option::<String>::deserialize(from)?;
    Ok(text.and_then(|text| {
        let text = IntoDeserializer::<ValueError>::into_deserializer(text);
        ErrorCode::deserialize(text).ok()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_of_other_releases_are_read() {
        let code = |json| serde_json::from_str::<ErrorBody>(json).unwrap().code;
        assert_eq!(code(r#"{"error":"x"}"#), None, "0.1.0 has no codes");
        assert_eq!(code(r#"{"error":"x","code":null}"#), None);
        assert_eq!(code(r#"{"error":"x","code":"of-a-later-release"}"#), None);
        assert_eq!(code(r#"{"error":"x","code":"vm-busy"}"#), Some(ErrorCode::VmBusy));
    }

    #[test]
    fn release_0_1_0_can_read_the_body() {
        #[derive(Deserialize)]
        struct Old {
            error: String,
        }
        let body = ErrorBody { error: "x".to_owned(), code: Some(ErrorCode::NoSuchVm) };
        let json = serde_json::to_string(&body).unwrap();
        assert_eq!(json, r#"{"error":"x","code":"no-such-vm"}"#);
        assert_eq!(serde_json::from_str::<Old>(&json).unwrap().error, "x");
        assert_eq!(ErrorCode::NoSuchVm.to_string(), "no-such-vm");
    }
}
