//! What is said about a switchover when its control connection is no more.

use serde::{Deserialize, Serialize};
use switchover::journal::Side;
use switchover::{Envelope, MigrationId, ToDestination, ToSource};

/// Something said on a connection of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inquiry {
    /// The agent that says it.
    pub from: String,
    /// What.
    pub word: Word,
}

/// A word of a switchover, and by it to which side. The answer, if there is one,
/// is such a word too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Word {
    /// The destination's.
    ToSource(Envelope<ToSource>),
    /// The source's.
    ToDestination(Envelope<ToDestination>),
}

impl Word {
    /// The migration that it is about.
    #[must_use]
    pub fn migration(&self) -> &MigrationId {
        match self {
            Self::ToSource(said) => &said.migration,
            Self::ToDestination(said) => &said.migration,
        }
    }

    /// The side that is meant.
    #[must_use]
    pub fn to(&self) -> Side {
        match self {
            Self::ToSource(_) => Side::Source,
            Self::ToDestination(_) => Side::Destination,
        }
    }

    /// The answer of an agent that keeps no journal of the migration.
    #[must_use]
    pub fn from_a_stranger(&self) -> Option<Self> {
        match self {
            Self::ToSource(said) => said.from_a_stranger().map(Self::ToDestination),
            Self::ToDestination(said) => said.from_a_stranger().map(Self::ToSource),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_says_whom_it_is_for() {
        let migration = MigrationId::new("m1").unwrap();
        let word = Word::ToSource(Envelope { migration, message: ToSource::Running });
        let inquiry = Inquiry { from: "b".to_owned(), word };
        let json = serde_json::to_string(&inquiry).unwrap();
        let expected = r#"{"from":"b","word":{"to-source":{"migration":"m1","say":"running"}}}"#;
        assert_eq!(json, expected);
        let heard: Inquiry = serde_json::from_str(&json).unwrap();
        assert_eq!((heard.word.to(), heard.word.migration().as_str()), (Side::Source, "m1"));
        let answer = heard.word.from_a_stranger().unwrap();
        assert_eq!(answer.to(), Side::Destination);
        assert_eq!(answer.from_a_stranger(), None);
    }
}
