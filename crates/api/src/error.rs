//! What every answer that is not 2xx says: a sentence for people, a code for programs.

use std::fmt;

use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

/// The body of every answer that is not 2xx.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What went wrong and what to do, for a person. It may be worded otherwise in
    /// another release.
    pub error: String,
    /// The same for a program. None from an agent that has no codes yet, or has one that
    /// this release doesn't know.
    #[serde(default, deserialize_with = "known")]
    pub code: Option<ErrorCode>,
}

/// What went wrong, for programs. A code keeps its meaning and its HTTP status in all
/// releases; later ones may have more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// Something in the request is not as it has to be, and no other code says more.
    InvalidRequest,
    /// Several hosts have a VM of that name, and the request doesn't say which is meant.
    AmbiguousVm,
    /// The VM is already at the host that it was to go to.
    AlreadyThere,
    /// The VM's memory would cross the network unencrypted.
    NotEncrypted,
    /// A decision about a VM came without the operator's word that it is certain.
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
    /// The path exists, and takes other methods.
    MethodNotAllowed,
    /// The state of something forbids it now, and no other code says more.
    Conflict,
    /// The name is taken, or the VM is adopted already.
    VmExists,
    /// The VM is starting, arriving, moving or being stopped.
    VmBusy,
    /// It is not decided which host the VM belongs to.
    VmInDoubt,
    /// It is decided which host the VM belongs to: nothing is left to decide.
    VmNotInDoubt,
    /// What the agent keeps of the VM can't be read.
    VmUnreadable,
    /// The VM's QEMU has ended.
    VmDead,
    /// The migration has not ended yet.
    MigrationRunning,
    /// The migration has ended.
    MigrationEnded,
    /// The migration is past the commit: the VM belongs to its destination.
    MigrationCommitted,
    /// The gang has not ended yet.
    GangRunning,
    /// The gang has ended.
    GangEnded,
    /// As many gangs run as one agent coordinates.
    TooManyGangs,
    /// No host has memory for the VM.
    NoRoom,
    /// The agent of another host can't be asked.
    HostSilent,
    /// This host failed at something: a file, a thread, a process.
    HostFailed,
    /// QEMU refused something, or can't be asked.
    QemuFailed,
    /// As many read events as one agent serves.
    TooManyReaders,
    /// As many follow migrations and gangs as one agent serves.
    TooManyWatchers,
    /// The agent is stopping.
    AgentStopping,
}

impl ErrorCode {
    /// The HTTP status of answers with this code.
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
            Self::TooManyReaders | Self::TooManyWatchers | Self::AgentStopping => 503,
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// None for what a newer release says.
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
    fn what_0_1_0_reads_is_there() {
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
