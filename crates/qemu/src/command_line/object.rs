//! The argument of `-object`, written as options or as JSON.

use serde_json::{Map, Value};

use super::CommandLineError;
use super::key_values::KeyValues;

/// An object and its properties.
#[derive(Clone, Debug)]
pub(super) enum Object {
    Options(KeyValues),
    Json(Map<String, Value>),
}

const KIND: &str = "qom-type";

impl Object {
    pub(super) fn parse(text: &str) -> Result<Self, CommandLineError> {
        if !text.trim_start().starts_with('{') {
            return Ok(Self::Options(KeyValues::parse(text, Some(KIND))));
        }
        serde_json::from_str(text).map(Self::Json).map_err(|error| CommandLineError::BadObject {
            text: text.to_owned(),
            reason: error.to_string(),
        })
    }

    pub(super) fn kind(&self) -> String {
        self.value(KIND).unwrap_or_default()
    }

    /// A property as text: numbers and switches of JSON too.
    pub(super) fn value(&self, key: &str) -> Option<String> {
        match self {
            Self::Options(options) => options.value(key).map(str::to_owned),
            Self::Json(members) => match members.get(key)? {
                Value::String(text) => Some(text.clone()),
                Value::Bool(on) => Some(if *on { "on" } else { "off" }.to_owned()),
                other => Some(other.to_string()),
            },
        }
    }

    /// Whether a switch is on.
    pub(super) fn is_on(&self, key: &str) -> bool {
        self.value(key).is_some_and(|value| matches!(value.as_str(), "on" | "yes" | "true" | "y"))
    }

    pub(super) fn remove(&mut self, key: &str) {
        match self {
            Self::Options(options) => options.remove(key),
            Self::Json(members) => drop(members.remove(key)),
        }
    }

    pub(super) fn set_text(&mut self, key: &str, value: &str) {
        match self {
            Self::Options(options) => {
                options.remove(key);
                options.push(key, value);
            }
            Self::Json(members) => drop(members.insert(key.to_owned(), value.into())),
        }
    }

    pub(super) fn set_switch(&mut self, key: &str, on: bool) {
        match self {
            Self::Options(_) => self.set_text(key, if on { "on" } else { "off" }),
            Self::Json(members) => drop(members.insert(key.to_owned(), on.into())),
        }
    }

    /// The same object as another kind. Its kind comes first.
    pub(super) fn with_kind(mut self, kind: &str) -> Self {
        match &mut self {
            Self::Options(options) => {
                let mut renamed = KeyValues::default();
                renamed.push(KIND, kind);
                options.remove(KIND);
                renamed.extend(std::mem::take(options));
                *options = renamed;
            }
            Self::Json(members) => drop(members.insert(KIND.to_owned(), kind.into())),
        }
        self
    }

    pub(super) fn text(&self) -> String {
        match self {
            Self::Options(options) => options.text(KIND),
            Self::Json(members) => Value::Object(members.clone()).to_string(),
        }
    }
}
