//! A share of one CPU, as the operator writes it: `5%`.

use std::num::NonZero;
use std::str::FromStr;
use std::thread;

use serde::Deserialize;

/// The text is not a share of a CPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a share of a CPU: write 0 to 100 with a percent sign, such as 5%")]
pub struct CpuShareError(String);

/// A share of one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct CpuShare(f64);

impl CpuShare {
    /// From 0 to 1.
    #[must_use]
    pub fn of_one(self) -> f64 {
        self.0
    }
}

/// The default scans about 100 MB a second, and on a host of few CPUs, which has little RAM, less:
/// it goes unnoticed by VMs that use all of them.
const DEFAULT_OF_ONE: f64 = 0.05;
const DEFAULT_OF_ALL: f64 = 0.0075;

impl CpuShare {
    fn default_of(cpus: usize) -> Self {
        Self(DEFAULT_OF_ONE.min(DEFAULT_OF_ALL * cpus as f64))
    }
}

impl Default for CpuShare {
    fn default() -> Self {
        Self::default_of(thread::available_parallelism().map_or(1, NonZero::get))
    }
}

impl FromStr for CpuShare {
    type Err = CpuShareError;

    fn from_str(text: &str) -> Result<Self, CpuShareError> {
        let number = text.strip_suffix('%').or((text == "0").then_some(text));
        let percent = number.and_then(|number| number.parse::<f64>().ok());
        let percent = percent.filter(|percent| (0.0..=100.0).contains(percent));
        let share = percent.map(|percent| Self(percent / 100.0));
        share.ok_or_else(|| CpuShareError(text.chars().take(80).collect()))
    }
}

impl TryFrom<String> for CpuShare {
    type Error = CpuShareError;

    fn try_from(text: String) -> Result<Self, CpuShareError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_host_is_scanned_slower_by_default() {
        let shares = [1, 2, 6, 7, 256].map(|cpus| CpuShare::default_of(cpus).of_one());
        assert_eq!(shares, [0.0075, 0.015, 0.045, 0.05, 0.05]);
    }

    #[test]
    fn a_share_has_a_percent_sign() {
        for (text, share) in [("5%", 0.05), ("0", 0.0), ("0%", 0.0), ("100%", 1.0), ("0.5%", 0.005)]
        {
            let parsed: CpuShare = text.parse().unwrap();
            assert!((parsed.of_one() - share).abs() < 1e-9, "{text}");
        }
        for text in ["", "5", "%", "101%", "-1%", "NaN%", "inf%", "5 %%"] {
            assert!(text.parse::<CpuShare>().is_err(), "{text}");
        }
    }
}
