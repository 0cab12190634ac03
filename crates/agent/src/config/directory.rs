//! The location of a rack's directory, as the operator writes it.

use std::str::FromStr;

use serde::Deserialize;

use super::secrets;

/// The text names no directory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a location of the directory: write `auto` for one in the agent of the rack's \
     first host, `off`, `host:NAME` for another host's agent, `redis://HOST[:PORT]` for a server \
     of Redis or Valkey, or several servers separated by commas for a cluster"
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
    /// A server of Redis or Valkey, or some of a cluster.
    Redis(Vec<String>),
}

impl FromStr for DirectoryChoice {
    type Err = DirectoryChoiceError;

    fn from_str(text: &str) -> Result<Self, DirectoryChoiceError> {
        let wrong = || DirectoryChoiceError(secrets::shown(text).chars().take(80).collect());
        let is_url = |url: &str| {
            ["redis://", "redis+unix://"]
                .iter()
                .any(|scheme| url.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty()))
        };
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => match text.strip_prefix("host:") {
                Some(host) if identity::check_name(host).is_ok() => Ok(Self::Host(host.to_owned())),
                Some(_) => Err(wrong()),
                None => {
                    let urls: Vec<String> = text.split(',').map(str::to_owned).collect();
                    if urls.iter().all(|url| is_url(url)) {
                        Ok(Self::Redis(urls))
                    } else {
                        Err(wrong())
                    }
                }
            },
        }
    }
}

impl DirectoryChoice {
    /// Whether it has a password.
    pub(super) fn has_password(&self) -> bool {
        match self {
            Self::Auto | Self::Off | Self::Host(_) => false,
            Self::Redis(urls) => urls.iter().any(|url| secrets::has_password(url)),
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
        let redis = |urls: &[&str]| {
            DirectoryChoice::Redis(urls.iter().map(|url| (*url).to_owned()).collect())
        };
        for (text, expected) in [
            ("auto", DirectoryChoice::Auto),
            ("off", DirectoryChoice::Off),
            ("host:r1-a", DirectoryChoice::Host("r1-a".to_owned())),
            ("redis://10.0.0.9", redis(&["redis://10.0.0.9"])),
            ("redis+unix:///run/redis.sock", redis(&["redis+unix:///run/redis.sock"])),
            ("redis://a:1,redis://b:2", redis(&["redis://a:1", "redis://b:2"])),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for text in ["", "host:", "host:a b", "redis://", "http://a", "redis://a,b", "Off"] {
            assert!(text.parse::<DirectoryChoice>().is_err(), "{text}");
        }
        let wrong = "redis:/:hunter2@a".parse::<DirectoryChoice>().unwrap_err().to_string();
        assert!(
            wrong.starts_with("`a` is not a location") && !wrong.contains("hunter2"),
            "{wrong}"
        );
    }
}
