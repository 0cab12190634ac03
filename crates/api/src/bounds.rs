//! The resources that a migration may use on its hosts.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use data_threads::{CpuFloor, Cpus, Priority};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{Object, ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

/// Bits per second on the wire, with decimal units: `200M` is 200,000,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BitRate(NonZeroU64);

/// The text is not a rate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a rate: write bits per second, such as 200M or 1.5G")]
pub struct BitRateError(String);

/// More bits per second than any link has, and exact as a float.
const BITS_MAX: f64 = 1e15;
const UNITS: [(char, u64); 4] =
    [('T', 1_000_000_000_000), ('G', 1_000_000_000), ('M', 1_000_000), ('k', 1000)];

impl BitRate {
    /// A rate of `bits_per_s`; none for 0.
    #[must_use]
    pub fn from_bits(bits_per_s: u64) -> Option<Self> {
        NonZeroU64::new(bits_per_s).map(Self)
    }

    /// The rate in bits per second.
    #[must_use]
    pub fn bits_per_s(self) -> u64 {
        self.0.get()
    }

    /// The rate in bytes per second.
    #[must_use]
    pub fn bytes_per_s(self) -> u64 {
        (self.0.get() / 8).max(1)
    }
}

impl PartialSchema for BitRate {
    fn schema() -> RefOr<Schema> {
        let about = "Bits per second on the wire";
        let number = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1));
        number.description(Some(about)).into()
    }
}

impl ToSchema for BitRate {}

impl FromStr for BitRate {
    type Err = BitRateError;

    fn from_str(text: &str) -> Result<Self, BitRateError> {
        let wrong = || BitRateError(text.chars().take(40).collect());
        let unit = UNITS.iter().find(|(letter, _)| {
            text.ends_with(*letter) || text.ends_with(letter.to_ascii_lowercase())
        });
        let (digits, factor) = match unit {
            Some((_, factor)) => (&text[..text.len() - 1], *factor),
            None => (text, 1),
        };
        let plain = digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let number: f64 = digits.parse().ok().filter(|_| plain).ok_or_else(wrong)?;
        let bits = (number * factor as f64).round();
        if bits > BITS_MAX {
            return Err(wrong());
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        Self::from_bits(bits as u64).ok_or_else(wrong)
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.0.get();
        match UNITS.iter().find(|(_, factor)| bits >= *factor) {
            Some((letter, factor)) => write!(f, "{}{letter}", bits as f64 / *factor as f64),
            None => write!(f, "{bits}"),
        }
    }
}

/// The resources that a migration may use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Bounds {
    /// The highest rate of all its lanes together.
    pub limit_bits_per_s: Option<BitRate>,
    /// The rate that it gets even if others want all of the link.
    pub reserve_bits_per_s: Option<BitRate>,
    /// What other traffic keeps of each network card if the VM would have to be throttled, or would
    /// miss its deadline, with what others leave; by default all that they use.
    // Left out for agents that don't know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve_min_bits_per_s: Option<BitRate>,
    /// The priority of its data threads over others on the same CPUs.
    #[schema(schema_with = priority)]
    pub priority: Priority,
    /// The percentage of the CPU time that its data threads need which they get among other
    /// threads, at both hosts, 1 to 100. Beyond it they run on idle CPUs only. Only with priority
    /// `low`, and if no disks move; by default as the agent is configured. 100: they are never
    /// restricted to idle CPUs.
    // Left out for agents that don't know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u8>)]
    pub cpu_floor: Option<CpuFloor>,
    /// The CPUs that its data threads run on, at both hosts; by default all.
    #[schema(value_type = Option<String>)]
    pub cpus: Option<Cpus>,
}

/// `PATCH /v1/migrations/ID`: a field that is left out stays as it is; `null` removes the bound.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BoundsChange {
    /// See [`Bounds::limit_bits_per_s`].
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<BitRate>)]
    pub limit_bits_per_s: Option<Option<BitRate>>,
    /// See [`Bounds::reserve_bits_per_s`].
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<BitRate>)]
    pub reserve_bits_per_s: Option<Option<BitRate>>,
    /// See [`Bounds::reserve_min_bits_per_s`].
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<BitRate>)]
    pub reserve_min_bits_per_s: Option<Option<BitRate>>,
    /// See [`Bounds::priority`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = priority)]
    pub priority: Option<Priority>,
    /// See [`Bounds::cpus`].
    #[serde(default, deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub cpus: Option<Option<Cpus>>,
}

impl BoundsChange {
    /// Whether it changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The bounds after the change.
    #[must_use]
    pub fn apply(self, to: Bounds) -> Bounds {
        Bounds {
            limit_bits_per_s: self.limit_bits_per_s.unwrap_or(to.limit_bits_per_s),
            reserve_bits_per_s: self.reserve_bits_per_s.unwrap_or(to.reserve_bits_per_s),
            reserve_min_bits_per_s: self
                .reserve_min_bits_per_s
                .unwrap_or(to.reserve_min_bits_per_s),
            priority: self.priority.unwrap_or(to.priority),
            cpu_floor: to.cpu_floor,
            cpus: self.cpus.unwrap_or(to.cpus),
        }
    }
}

/// The schema of [`Priority`], whose crate does not depend on utoipa.
fn priority() -> Object {
    let values = [Priority::Low, Priority::Normal, Priority::High].map(|one| json!(one));
    ObjectBuilder::new().schema_type(Type::String).enum_values(Some(values)).build()
}

/// Keeps a `null` apart from a field that is left out.
fn named<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// A change of a migration's bounds while it ran.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct BoundsChanged {
    /// Seconds since the command.
    pub at_s: f64,
    /// The bounds from then on.
    pub bounds: Bounds,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(text: &str) -> BitRate {
        text.parse().unwrap()
    }

    #[test]
    fn rates_are_bits() {
        for (text, bits, shown) in [
            ("200M", 200_000_000, "200M"),
            ("200m", 200_000_000, "200M"),
            ("1.5G", 1_500_000_000, "1.5G"),
            ("8000", 8000, "8k"),
            ("64k", 64_000, "64k"),
            ("999", 999, "999"),
        ] {
            assert_eq!(Some(rate(text)), BitRate::from_bits(bits), "{text}");
            assert_eq!(rate(text).to_string(), shown);
        }
        assert_eq!(rate("1G").bytes_per_s(), 125_000_000);
    }

    #[test]
    fn what_is_no_rate_is_refused() {
        for text in ["", "M", "0", "0.1", "-1M", "1e9", "nan", "fast", "1Mbit", "1 M", "2000T", "ä"]
        {
            let error = text.parse::<BitRate>().unwrap_err().to_string();
            assert!(error.contains("200M"), "{text}: {error}");
        }
    }

    #[test]
    fn a_change_keeps_what_it_does_not_name() {
        let before = Bounds {
            limit_bits_per_s: Some(rate("200M")),
            reserve_bits_per_s: Some(rate("10M")),
            reserve_min_bits_per_s: Some(rate("50M")),
            priority: Priority::High,
            cpu_floor: CpuFloor::try_from(20_u8).ok(),
            cpus: Some("0-1".parse().unwrap()),
        };
        let change: BoundsChange =
            serde_json::from_str(r#"{"limit_bits_per_s":null,"cpus":"2"}"#).unwrap();
        let after = change.clone().apply(before.clone());
        let expected =
            Bounds { limit_bits_per_s: None, cpus: Some("2".parse().unwrap()), ..before.clone() };
        assert_eq!(after, expected);
        let again: BoundsChange =
            serde_json::from_value(serde_json::to_value(&change).unwrap()).unwrap();
        assert_eq!(again, change);
        let nothing: BoundsChange = serde_json::from_str("{}").unwrap();
        assert!(nothing.is_empty() && !change.is_empty());
        assert_eq!(nothing.apply(before.clone()), before);
        let json = serde_json::to_string(&Bounds::default()).unwrap();
        for newer in ["reserve_min", "cpu_floor"] {
            assert!(!json.contains(newer), "agents of 0.1.0 refuse it: {json}");
        }
        for wrong in [r#"{"speed":1}"#, r#"{"limit_bits_per_s":0}"#, r#"{"cpus":"x"}"#] {
            assert!(serde_json::from_str::<BoundsChange>(wrong).is_err(), "{wrong}");
        }
    }
}
