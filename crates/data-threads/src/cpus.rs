//! A list of CPUs, as the kernel writes it: `0-3,8`.

use std::fmt;
use std::str::FromStr;

use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};

/// The text is not a list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a list of CPUs: write it like 0-3,8, with numbers below {max}",
    max = CpuSet::MAX_CPU
)]
pub struct CpusError(String);

/// A set of at least one CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cpus(Vec<(usize, usize)>);

impl Cpus {
    /// The CPUs of a set.
    pub(crate) fn of(set: &CpuSet) -> Self {
        Self::runs((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)))
    }

    pub(crate) fn set(&self) -> CpuSet {
        let mut set = CpuSet::new();
        for (first, last) in &self.0 {
            (*first..=*last).for_each(|cpu| set.set(cpu));
        }
        set
    }

    /// Joins ascending numbers into ranges.
    fn runs(numbers: impl Iterator<Item = usize>) -> Self {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for number in numbers {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == number => *last = number,
                _ => runs.push((number, number)),
            }
        }
        Self(runs)
    }
}

impl FromStr for Cpus {
    type Err = CpusError;

    fn from_str(text: &str) -> Result<Self, CpusError> {
        let wrong = || CpusError(text.chars().take(80).collect());
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let number = text.parse().ok().filter(|_| digits);
            number.filter(|cpu: &usize| *cpu < CpuSet::MAX_CPU).ok_or_else(wrong)
        };
        let mut set = CpuSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            (first..=last).for_each(|cpu| set.set(cpu));
        }
        Ok(Self::of(&set))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, (first, last)) in self.0.iter().enumerate() {
            let comma = if nth == 0 { "" } else { "," };
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl TryFrom<String> for Cpus {
    type Error = CpusError;

    fn try_from(text: String) -> Result<Self, CpusError> {
        text.parse()
    }
}

impl From<Cpus> for String {
    fn from(cpus: Cpus) -> Self {
        cpus.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        for (text, means) in
            [("0", "0"), ("0-3,8", "0-3,8"), ("8,0-3", "0-3,8"), ("1,2,3", "1-3"), ("5-5", "5")]
        {
            assert_eq!(text.parse::<Cpus>().unwrap().to_string(), means, "{text}");
        }
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["", ",", "1,", "-1", "3-1", "a", "1024", "0-99999999999999999999", "+1", " 1"]
        {
            let error = text.parse::<Cpus>().unwrap_err().to_string();
            assert!(error.contains("0-3,8"), "{text}: {error}");
            assert!(serde_json::from_value::<Cpus>(text.into()).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_or_an_error(text in "[0-9,-]{0,20}|.{0,20}") {
            if let Ok(cpus) = text.parse::<Cpus>() {
                let again: Cpus = cpus.to_string().parse().unwrap();
                prop_assert_eq!(&again, &cpus);
                prop_assert_eq!(Cpus::of(&cpus.set()), cpus);
            }
        }
    }
}
