//! Whether what arrived is what QEMU handed over.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How much of a migration is audited before its VM is given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Audit {
    /// Nothing.
    Off,
    /// What was placed last of each page, against what QEMU handed over last.
    #[default]
    On,
    /// Also what the destination's RAM holds, read back.
    Deep,
}

/// What an audit found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "found")]
pub enum Audited {
    /// It wasn't made, or not to its end.
    Nothing {
        /// Why not.
        why: String,
    },
    /// Every page is as QEMU handed it over.
    Same {
        /// All of the VM's.
        pages: u64,
        /// Of them, those that were read back from the destination's RAM.
        reread_pages: u64,
    },
    /// Some are not. The VM stayed at its source.
    Differences {
        /// How many, of those that were looked at.
        pages: u64,
        /// The first ones: which pages, and how they came.
        examples: Vec<String>,
    },
}

impl Audited {
    /// Who is to blame for pages that a guest finds wrong after such a migration.
    #[must_use]
    pub fn explains_wrong_pages(&self) -> &'static str {
        match self {
            Self::Nothing { .. } => "its migration was not audited: what lost them is not known",
            Self::Same { .. } => {
                "its migration's audit was clean: QEMU never handed over what is missing"
            }
            Self::Differences { .. } => {
                "its migration's audit found differences: Droveway lost them"
            }
        }
    }
}

impl Default for Audited {
    fn default() -> Self {
        Self::Nothing { why: "the migration ended before its audit".to_owned() }
    }
}
