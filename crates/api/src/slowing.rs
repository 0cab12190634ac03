//! How far a VM may be throttled so that its migration converges.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::times::{SECONDS_MAX, is_in_range};

/// Whether a VM that dirties memory faster than it can be delivered is throttled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Throttle {
    /// If the migration would not meet its downtime goal otherwise, and as far as needed.
    #[default]
    Auto,
    /// Never.
    Off,
    /// If the migration would not converge otherwise, so that the VM dirties this share of
    /// what can be delivered.
    Ratio(f64),
}

/// The text is not a throttle setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not auto, off, or a number above 0 and below 1 such as 0.7")]
pub struct ThrottleError(String);

impl FromStr for Throttle {
    type Err = ThrottleError;

    fn from_str(text: &str) -> Result<Self, ThrottleError> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            number => {
                let ratio = number.parse().ok().filter(|ratio| is_share(*ratio) && *ratio < 1.0);
                let wrong = || ThrottleError(number.chars().take(40).collect());
                ratio.map(Self::Ratio).ok_or_else(wrong)
            }
        }
    }
}

impl fmt::Display for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Ratio(ratio) => write!(f, "{ratio}"),
        }
    }
}

/// What to do with a VM that does not converge even at its floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnStall {
    /// Keep trying.
    Keep,
    /// Stop it and move what is left, however long the downtime.
    Stop,
    /// Cancel the migration; the VM stays at its source.
    Cancel,
}

/// How far a VM may be throttled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Slowing {
    /// Whether it is throttled.
    pub throttle: Throttle,
    /// The least share of its CPU time that it keeps.
    pub floor: f64,
    /// When it is to have arrived, in seconds from the command.
    ///
    /// It is throttled as far as that takes.
    #[schema(minimum = 1, maximum = 86_400)]
    pub deadline_s: Option<u64>,
    /// What to do if even the floor does not suffice.
    ///
    /// By default a migration that may throttle its VM is then cancelled, and one that may not goes
    /// on.
    pub on_stall: Option<OnStall>,
}

/// Below a fifth of its speed, a VM's service fails rather than slows down.
const FLOOR: f64 = 0.2;

impl Default for Slowing {
    fn default() -> Self {
        Self { throttle: Throttle::Auto, floor: FLOOR, deadline_s: None, on_stall: None }
    }
}

/// A request with a value out of range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SlowingError {
    /// The floor is not a share.
    #[error(
        "a throttle floor of {0} is not a share of the VM's CPU time: it is above 0 and at most 1"
    )]
    Floor(f64),
    /// The ratio is out of range.
    #[error("{0} is not a throttle ratio: that is above 0 and below 1")]
    Ratio(f64),
    /// The deadline is out of range.
    #[error("a deadline of {0} s is outside 1 to {max}", max = SECONDS_MAX)]
    Deadline(u64),
}

impl Slowing {
    /// Checks that its values are in range.
    ///
    /// # Errors
    /// If one is not.
    pub fn check(&self) -> Result<(), SlowingError> {
        if !is_share(self.floor) {
            return Err(SlowingError::Floor(self.floor));
        }
        if let Some(seconds) = self.deadline_s.filter(|seconds| !is_in_range(*seconds)) {
            return Err(SlowingError::Deadline(seconds));
        }
        match self.throttle {
            Throttle::Ratio(ratio) if !is_share(ratio) || ratio >= 1.0 => {
                Err(SlowingError::Ratio(ratio))
            }
            _ => Ok(()),
        }
    }
}

fn is_share(number: f64) -> bool {
    number > 0.0 && number <= 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_is_what_is_shown() {
        for text in ["auto", "off", "0.7"] {
            assert_eq!(text.parse::<Throttle>().unwrap().to_string(), text);
        }
        for wrong in ["", "on", "1", "0", "-0.5", "7", "NaN", "60%"] {
            let error = wrong.parse::<Throttle>().unwrap_err().to_string();
            assert!(error.contains("auto, off"), "{error}");
        }
    }

    #[test]
    fn a_request_may_leave_all_of_it_out_but_not_ask_for_nonsense() {
        let parse = |json| serde_json::from_str::<Slowing>(json);
        assert_eq!(parse("{}").unwrap(), Slowing::default());
        let full =
            parse(r#"{"throttle":{"ratio":0.6},"floor":0.05,"deadline_s":60,"on_stall":"stop"}"#);
        assert_eq!(full.unwrap().throttle, Throttle::Ratio(0.6));
        assert!(parse(r#"{"florr":0.1}"#).is_err());
        for wrong in [
            r#"{"floor":0}"#,
            r#"{"floor":1.5}"#,
            r#"{"throttle":{"ratio":1.0}}"#,
            r#"{"deadline_s":0}"#,
            r#"{"deadline_s":18446744073709551615}"#,
        ] {
            assert!(parse(wrong).unwrap().check().is_err(), "{wrong}");
        }
        parse(r#"{"deadline_s":86400}"#).unwrap().check().unwrap();
        Slowing::default().check().unwrap();
    }
}
