//! Messages of a switchover after its control connection was lost.

use serde::{Deserialize, Serialize};
use switchover::journal::Side;
use switchover::{Envelope, MigrationId, ToDestination, ToSource};

/// A message on a connection of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inquiry {
    /// The sending agent's name.
    pub from: String,
    /// The message.
    pub word: Word,
}

/// A message of a switchover, which tells the side that it is for. The answer, if there is one, is
/// such a message too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Word {
    /// A message of the destination.
    ToSource(Envelope<ToSource>),
    /// A message of the source.
    ToDestination(Envelope<ToDestination>),
}

impl Word {
    /// The migration that it belongs to.
    #[must_use]
    pub fn migration(&self) -> &MigrationId {
        match self {
            Self::ToSource(said) => &said.migration,
            Self::ToDestination(said) => &said.migration,
        }
    }

    /// The receiving side.
    #[must_use]
    pub fn to(&self) -> Side {
        match self {
            Self::ToSource(_) => Side::Source,
            Self::ToDestination(_) => Side::Destination,
        }
    }

    /// The answer of an agent that has no journal of the migration.
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
    fn a_word_tells_its_receiver() {
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
