//! A share of one CPU, as the operator writes it: `5%`.

use std::str::FromStr;

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

/// 5 % goes unnoticed, and scans about 100 MB a second.
impl Default for CpuShare {
    fn default() -> Self {
        Self(0.05)
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
