//! A part of a message that may be of another version.

use serde::de::DeserializeOwned;
use serde::ser::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A part that a peer of another version may send in a form that this one doesn't understand. The
/// rest of the message is still read, and the code that needs the part can tell the operator which
/// one it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part<T> {
    /// It is understood.
    Read(T),
    /// It isn't understood, for this reason.
    Odd(String),
}

impl<T> Part<T> {
    /// Its value.
    ///
    /// # Errors
    /// The reason why it isn't understood.
    pub fn read(&self) -> Result<&T, &str> {
        match self {
            Self::Read(said) => Ok(said),
            Self::Odd(why) => Err(why),
        }
    }
}

impl<T> From<T> for Part<T> {
    fn from(said: T) -> Self {
        Self::Read(said)
    }
}

impl<T: Serialize> Serialize for Part<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.read().map_err(S::Error::custom)?.serialize(serializer)
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Part<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // It is read to its end before it is interpreted, because other parts follow it.
        let json = serde_json::Value::deserialize(deserializer)?;
        Ok(T::deserialize(json).map_or_else(|error| Self::Odd(error.to_string()), Self::Read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Two {
        first: Part<Vec<u8>>,
        second: u8,
    }

    #[test]
    fn a_part_is_what_it_holds() {
        let json = r#"{"first":[1,2],"second":3}"#;
        let two: Two = serde_json::from_str(json).unwrap();
        assert_eq!(two, Two { first: vec![1, 2].into(), second: 3 });
        assert_eq!(serde_json::to_string(&two).unwrap(), json);
    }

    #[test]
    fn an_odd_part_does_not_cost_the_message() {
        let two: Two = serde_json::from_str(r#"{"first":{"a":[1]},"second":3}"#).unwrap();
        assert_eq!(two.second, 3);
        let why = two.first.read().unwrap_err();
        assert!(why.contains("map"), "{why}");
        assert!(serde_json::to_string(&two).is_err(), "what wasn't understood is not repeated");
        assert!(serde_json::from_str::<Two>(r#"{"second":3}"#).is_err(), "it has to be there");
    }
}
