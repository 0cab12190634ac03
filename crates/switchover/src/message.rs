//! The messages that the two sides send each other from `loaded` on.
//!
//! Every message carries its sender's state, and is a query too: the receiver answers with its own
//! state. So a lost message is simply sent again, and no other query is needed.

use serde::{Deserialize, Serialize};

use crate::migration_id::MigrationId;
use crate::reason::Reason;

/// A message and the migration that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Envelope<M> {
    /// Which migration; a machine ignores messages of any other.
    pub migration: MigrationId,
    /// The message.
    #[serde(flatten)]
    pub message: M,
}

/// A message from the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum ToDestination {
    /// The source has given the VM up for good: take it.
    Go {
        /// Whether the VM runs; one that its owner paused stays paused.
        run: bool,
    },
    /// The source keeps the VM for good: end your QEMU.
    Aborted {
        /// Why.
        reason: Reason,
    },
    /// The source has no journal of this migration, or no longer: the migration is over for it. It
    /// never gave the VM up, or it knows how the migration ended.
    Unknown,
}

/// A message from the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum ToSource {
    /// The VM is loaded and waits for the source's decision.
    Loaded,
    /// The VM is the destination's now: it runs, or is paused as its owner left it.
    Running,
    /// The VM never ran here and never will: its QEMU has ended.
    Refused {
        /// Why.
        reason: Reason,
    },
    /// The VM ran here, or may have, and its QEMU died.
    Lost {
        /// How it died.
        reason: Reason,
    },
    /// The destination has no journal of this migration.
    Unknown,
}

impl Envelope<ToSource> {
    /// The answer of a source's agent that has no journal of this migration.
    ///
    /// Only an agent that has read all its journals may give it, and not if one of them can't be
    /// read: see [`crate::journal::JournalDir::keeps`].
    #[must_use]
    pub fn answer_without_journal(&self) -> Option<Envelope<ToDestination>> {
        let message = ToDestination::Unknown;
        let answer = || Envelope { migration: self.migration.clone(), message };
        (self.message != ToSource::Unknown).then(answer)
    }
}

impl Envelope<ToDestination> {
    /// The answer of a destination's agent that has no journal of this migration, under the same
    /// condition.
    #[must_use]
    pub fn answer_without_journal(&self) -> Option<Envelope<ToSource>> {
        let message = ToSource::Unknown;
        let answer = || Envelope { migration: self.migration.clone(), message };
        (self.message != ToDestination::Unknown).then(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_flat_object() {
        let migration = MigrationId::new("m1").unwrap();
        let said = Envelope { migration, message: ToDestination::Go { run: true } };
        let json = serde_json::to_string(&said).unwrap();
        assert_eq!(json, r#"{"migration":"m1","say":"go","run":true}"#);
        assert_eq!(serde_json::from_str::<Envelope<ToDestination>>(&json).unwrap(), said);
    }

    #[test]
    fn strangers_do_not_answer_each_other_for_ever() {
        let migration = MigrationId::new("m1").unwrap();
        let asked = Envelope { migration, message: ToSource::Loaded };
        let answer = asked.answer_without_journal().unwrap();
        assert_eq!(answer.message, ToDestination::Unknown);
        assert_eq!(answer.answer_without_journal(), None);
    }
}
