//! The location of a rack's directory, as the operator writes it.

use std::str::FromStr;

use serde::Deserialize;

use super::secrets;

/// The text names no directory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a location of the directory: write `auto` for one in the agent of the rack's \
     first host, `off`, or `host:NAME` for another host's agent"
)]
pub struct DirectoryChoiceError(String);

/// The directory to use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum DirectoryChoice {
    /// The one in the agent of the rack's first host in the order of names.
    #[default]
    Auto,
    /// None: nothing is shared across hosts.
    Off,
    /// The one in that host's agent.
    Host(String),
}

impl FromStr for DirectoryChoice {
    type Err = DirectoryChoiceError;

    fn from_str(text: &str) -> Result<Self, DirectoryChoiceError> {
        let wrong = || DirectoryChoiceError(secrets::shown(text).chars().take(80).collect());
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => match text.strip_prefix("host:") {
                Some(host) if identity::check_name(host).is_ok() => Ok(Self::Host(host.to_owned())),
                _ => Err(wrong()),
            },
        }
    }
}

impl TryFrom<String> for DirectoryChoice {
    type Error = DirectoryChoiceError;

    fn try_from(text: String) -> Result<Self, DirectoryChoiceError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_named_in_one_of_a_few_ways() {
        for (text, expected) in [
            ("auto", DirectoryChoice::Auto),
            ("off", DirectoryChoice::Off),
            ("host:r1-a", DirectoryChoice::Host("r1-a".to_owned())),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for text in ["", "host:", "host:a b", "http://a", "Off"] {
            assert!(text.parse::<DirectoryChoice>().is_err(), "{text}");
        }
        // As an agent's file had it before 0.2.0.
        let wrong = "redis://:hunter2@a".parse::<DirectoryChoice>().unwrap_err().to_string();
        assert!(
            wrong.starts_with("`redis://a` is not a location") && !wrong.contains("hunter2"),
            "{wrong}"
        );
    }
}
