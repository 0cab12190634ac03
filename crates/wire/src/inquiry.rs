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
    #[serde(rename = "word")]
    pub message: SwitchoverMessage,
}

/// A message of a switchover, with the side that receives it. The answer, if there is one, is such
/// a message too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SwitchoverMessage {
    /// A message of the destination.
    ToSource(Envelope<ToSource>),
    /// A message of the source.
    ToDestination(Envelope<ToDestination>),
}

impl SwitchoverMessage {
    /// The migration that it belongs to.
    #[must_use]
    pub fn migration(&self) -> &MigrationId {
        match self {
            Self::ToSource(envelope) => &envelope.migration,
            Self::ToDestination(envelope) => &envelope.migration,
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
    pub fn answer_without_journal(&self) -> Option<Self> {
        match self {
            Self::ToSource(envelope) => envelope.answer_without_journal().map(Self::ToDestination),
            Self::ToDestination(envelope) => envelope.answer_without_journal().map(Self::ToSource),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_its_receiver() {
        let migration = MigrationId::new("m1").unwrap();
        let message =
            SwitchoverMessage::ToSource(Envelope { migration, message: ToSource::Running });
        let inquiry = Inquiry { from: "b".to_owned(), message };
        let json = serde_json::to_string(&inquiry).unwrap();
        let expected = r#"{"from":"b","word":{"to-source":{"migration":"m1","say":"running"}}}"#;
        assert_eq!(json, expected);
        let received: Inquiry = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (received.message.to(), received.message.migration().as_str()),
            (Side::Source, "m1")
        );
        let answer = received.message.answer_without_journal().unwrap();
        assert_eq!(answer.to(), Side::Destination);
        assert_eq!(answer.answer_without_journal(), None);
    }
}
