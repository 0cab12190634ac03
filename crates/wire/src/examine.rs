//! Questions from one agent to another, and the answers.

use facts::host::Facts;
use serde::{Deserialize, Serialize};

use crate::carry::Target;

/// More than a packet of any NIC carries, so that packets of full length must get through.
pub const FILLER_BYTES: usize = 64 << 10;
/// The most programs in one question.
pub const PROGRAMS_MAX: usize = 8;
/// The most taps in one question.
pub const TAPS_MAX: usize = 1024;

/// A question of the examining agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum Question {
    /// Whether the agent is there, and its time.
    Reach {
        /// [`FILLER_BYTES`] of arbitrary text; the answer has as many.
        filler: String,
    },
    /// What the agent knows of its host.
    Facts {
        /// QEMU programs to examine for their capabilities, each with an accelerator.
        programs: Vec<(String, String)>,
        /// Tap devices that VMs use.
        #[serde(default)]
        taps: Vec<String>,
    },
    /// Whether a VM that another manager moves will arrive there.
    Comes {
        /// Where its QEMU listens.
        target: Target,
    },
    /// A question of a newer version.
    #[serde(other)]
    Unknown,
}

/// The answer of the examined agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// Answers [`Question::Reach`].
    Reached(Reached),
    /// Answers [`Question::Facts`].
    Facts(Box<Facts>),
    /// Answers [`Question::Comes`].
    Comes {
        /// Whether the VM will arrive.
        here: bool,
    },
    /// The question was not understood.
    #[serde(other)]
    Unknown,
}

/// The agent's identity and time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reached {
    /// The host's name.
    pub host: String,
    /// Droveway's version there.
    pub droveway: String,
    /// Its time, since 1970.
    pub at_unix_ms: u64,
    /// As much filler as was sent.
    pub filler: String,
}
