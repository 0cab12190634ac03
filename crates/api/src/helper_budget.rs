//! The resources that the helper may use in its guest.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

const CPU_PERCENT: RangeInclusive<u16> = 1..=100;
const TIME_MS: RangeInclusive<u32> = 1..=600_000;
const MEMORY_BYTES: RangeInclusive<u64> = 4 << 20..=1 << 30;
const MEMORY_UNITS: [(char, u64); 3] = [('G', 1 << 30), ('M', 1 << 20), ('K', 1 << 10)];
const MS_PER_S: u32 = 1000;

/// The resources that the helper may use in its guest for one answer.
///
/// Typed as `cpu=20%,time=2s,memory=16M`, where each part is optional. The helper keeps to it, and
/// the agent waits only a little longer than the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HelperBudget {
    /// The share of one CPU, 1 to 100.
    pub cpu_percent: u16,
    /// From the request to the end of the answer, up to 10 minutes.
    pub time_ms: u32,
    /// For its lists and buffers, 4 MiB to 1 GiB.
    ///
    /// The guest's kernel may use as much again to load inodes and directory entries that it no
    /// longer caches.
    pub memory_bytes: u64,
}

impl Default for HelperBudget {
    fn default() -> Self {
        Self { cpu_percent: 50, time_ms: 10_000, memory_bytes: 32 << 20 }
    }
}

/// The text is not a budget.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelperBudgetError {
    /// An unknown part.
    #[error("`{0}` is not a part of a helper's budget: write cpu=20%,time=2s,memory=16M")]
    Word(String),
    /// A part that is given twice.
    #[error("`{0}` is in the helper's budget twice")]
    Twice(String),
    /// Not a share of a CPU.
    #[error("`{0}` is not a share of a CPU: write 1% to 100%")]
    Cpu(String),
    /// Not a time.
    #[error("`{0}` is not a time for the helper: write up to 600s, or milliseconds as 500ms")]
    Time(String),
    /// Not an amount of memory.
    #[error("`{0}` is not an amount of memory for the helper: write 4M to 1G")]
    Memory(String),
}

impl FromStr for HelperBudget {
    type Err = HelperBudgetError;

    fn from_str(text: &str) -> Result<Self, HelperBudgetError> {
        let mut budget = Self::default();
        let mut seen = Vec::new();
        for word in text.split(',') {
            let unknown = || HelperBudgetError::Word(shortened(word));
            let (name, value) = word.split_once('=').ok_or_else(unknown)?;
            match name {
                "cpu" => budget.cpu_percent = cpu(value)?,
                "time" => budget.time_ms = time(value)?,
                "memory" => budget.memory_bytes = memory(value)?,
                _ => return Err(unknown()),
            }
            if seen.contains(&name) {
                return Err(HelperBudgetError::Twice(name.to_owned()));
            }
            seen.push(name);
        }
        Ok(budget)
    }
}

fn cpu(value: &str) -> Result<u16, HelperBudgetError> {
    let percent = value.strip_suffix('%').and_then(|digits| number(digits)?.try_into().ok());
    let within = percent.filter(|percent| CPU_PERCENT.contains(percent));
    within.ok_or_else(|| HelperBudgetError::Cpu(shortened(value)))
}

fn time(value: &str) -> Result<u32, HelperBudgetError> {
    let ms = match (value.strip_suffix("ms"), value.strip_suffix('s')) {
        (Some(digits), _) => number(digits),
        (None, Some(digits)) => number(digits).and_then(|s| s.checked_mul(MS_PER_S.into())),
        (None, None) => None,
    };
    let within = ms.and_then(|ms| ms.try_into().ok()).filter(|ms| TIME_MS.contains(ms));
    within.ok_or_else(|| HelperBudgetError::Time(shortened(value)))
}

fn memory(value: &str) -> Result<u64, HelperBudgetError> {
    let unit = MEMORY_UNITS.iter().find_map(|(letter, factor)| {
        let digits = value.strip_suffix([*letter, letter.to_ascii_lowercase()])?;
        Some((digits, *factor))
    });
    let (digits, factor) = unit.unwrap_or((value, 1));
    let bytes = number(digits).and_then(|number| number.checked_mul(factor));
    let within = bytes.filter(|bytes| MEMORY_BYTES.contains(bytes));
    within.ok_or_else(|| HelperBudgetError::Memory(shortened(value)))
}

fn number(digits: &str) -> Option<u64> {
    // `parse` would also accept a sign.
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| plain)
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

impl fmt::Display for HelperBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu_percent, time_ms, memory_bytes } = self;
        write!(f, "cpu={cpu_percent}%,")?;
        if time_ms.is_multiple_of(MS_PER_S) {
            write!(f, "time={}s,", time_ms / MS_PER_S)?;
        } else {
            write!(f, "time={time_ms}ms,")?;
        }
        let unit = MEMORY_UNITS.iter().find(|(_, factor)| memory_bytes.is_multiple_of(*factor));
        match unit {
            Some((letter, factor)) => write!(f, "memory={}{letter}", memory_bytes / factor),
            None => write!(f, "memory={memory_bytes}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_as_usual() {
        let usual = HelperBudget::default();
        for (text, budget) in [
            (
                "cpu=20%,time=2s,memory=16M",
                HelperBudget { cpu_percent: 20, time_ms: 2000, memory_bytes: 16 << 20 },
            ),
            ("time=500ms", HelperBudget { time_ms: 500, ..usual }),
            ("memory=1g", HelperBudget { memory_bytes: 1 << 30, ..usual }),
            (
                "memory=5000k,cpu=1%",
                HelperBudget { cpu_percent: 1, memory_bytes: 5000 << 10, ..usual },
            ),
        ] {
            assert_eq!(text.parse(), Ok(budget), "{text}");
            assert_eq!(budget.to_string().parse(), Ok(budget), "{budget}");
        }
        assert_eq!(usual.to_string(), "cpu=50%,time=10s,memory=32M");
    }

    #[test]
    fn what_is_wrong_is_named() {
        use HelperBudgetError::{Cpu, Memory, Time, Twice, Word};
        for (text, error) in [
            ("", Word(String::new())),
            ("cpu", Word("cpu".to_owned())),
            ("cpu=20%,", Word(String::new())),
            ("disk=1M", Word("disk=1M".to_owned())),
            ("cpu=20%,cpu=30%", Twice("cpu".to_owned())),
            ("cpu=20", Cpu("20".to_owned())),
            ("cpu=0%", Cpu("0%".to_owned())),
            ("cpu=101%", Cpu("101%".to_owned())),
            ("cpu=+20%", Cpu("+20%".to_owned())),
            ("time=2", Time("2".to_owned())),
            ("time=0s", Time("0s".to_owned())),
            ("time=601s", Time("601s".to_owned())),
            ("time=99999999999999999999s", Time("99999999999999999999s".to_owned())),
            ("memory=3M", Memory("3M".to_owned())),
            ("memory=2G", Memory("2G".to_owned())),
            ("memory=M", Memory("M".to_owned())),
        ] {
            assert_eq!(text.parse::<HelperBudget>(), Err(error), "{text}");
        }
    }
}
