//! What one agent asks another, and its answer.

use facts::host::Facts;
use serde::{Deserialize, Serialize};

use crate::carry::Target;

/// More than a packet of any network card carries, so that packets of full
/// length have to get through.
pub const FILLER_BYTES: usize = 64 << 10;
/// Most programs that are asked for one question.
pub const PROGRAMS_MAX: usize = 8;

/// From the agent that examines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum Question {
    /// Whether somebody is there, and what time it is.
    Reach {
        /// [`FILLER_BYTES`] of anything; the answer has as many.
        filler: String,
    },
    /// All that the agent sees of its host.
    Facts {
        /// QEMU's programs to ask what they can do, each with an accelerator.
        programs: Vec<(String, String)>,
    },
    /// Whether a VM that somebody else moves is to come there.
    Comes {
        /// To where.
        target: Target,
    },
    /// Of a newer version.
    #[serde(other)]
    Unknown,
}

/// From the agent that is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// To [`Question::Reach`].
    Reached(Reached),
    /// To [`Question::Facts`].
    Facts(Box<Facts>),
    /// To [`Question::Comes`].
    Comes {
        /// It is.
        here: bool,
    },
    /// It was not understood.
    #[serde(other)]
    Unknown,
}

/// That somebody is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reached {
    /// The host's name.
    pub host: String,
    /// Droveway's version there.
    pub droveway: String,
    /// The time there, since 1970.
    pub at_unix_ms: u64,
    /// As much as was sent.
    pub filler: String,
}
