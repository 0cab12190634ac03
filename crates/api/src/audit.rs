//! The audit: whether the pages that arrived are those that QEMU handed over.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How much of a migration is audited before the source releases the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Audit {
    /// Nothing.
    Off,
    /// The last version of each page that was placed, against the last that QEMU handed over.
    #[default]
    On,
    /// Also the destination's RAM, read back.
    Deep,
}

/// What an audit found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "found")]
pub enum Audited {
    /// The audit did not run, or did not finish.
    Nothing {
        /// Why not.
        why: String,
    },
    /// Every page is as QEMU handed it over.
    Same {
        /// All pages of the VM.
        pages: u64,
        /// Of those, the pages that were read back from the destination's RAM.
        reread_pages: u64,
        /// Of those, the pages that arrived with something else than QEMU handed over last, and
        /// that can't be distinguished from wrong ones: the source had sent them with two contents.
        #[serde(default)]
        unproved_pages: u64,
    },
    /// Some pages differ; the VM stayed at its source.
    Differences {
        /// How many, of those that were audited.
        pages: u64,
        /// The first of them: which pages, and how they arrived.
        examples: Vec<String>,
    },
}

impl Default for Audited {
    fn default() -> Self {
        Self::Nothing { why: "the migration ended before its audit".to_owned() }
    }
}
