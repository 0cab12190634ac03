//! The least share of CPU time that data threads get.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// It is not a floor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a percentage from 1 to 100")]
pub struct CpuFloorError(String);

/// The percentage of the CPU time that data threads need which they get among other threads. Beyond
/// it they run on idle CPUs only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct CpuFloor(u8);

impl CpuFloor {
    /// They are never restricted to idle CPUs.
    pub const ALL: Self = Self(100);

    /// As a share, from 0 to 1.
    #[must_use]
    pub fn share(self) -> f64 {
        f64::from(self.0) / 100.0
    }
}

impl TryFrom<u8> for CpuFloor {
    type Error = CpuFloorError;

    fn try_from(percent: u8) -> Result<Self, CpuFloorError> {
        let floor = (1..=100).contains(&percent).then_some(Self(percent));
        floor.ok_or_else(|| CpuFloorError(percent.to_string()))
    }
}

impl From<CpuFloor> for u8 {
    fn from(floor: CpuFloor) -> Self {
        floor.0
    }
}

impl FromStr for CpuFloor {
    type Err = CpuFloorError;

    fn from_str(text: &str) -> Result<Self, CpuFloorError> {
        let percent = text.parse::<u8>().ok();
        let floor = percent.and_then(|percent| Self::try_from(percent).ok());
        floor.ok_or_else(|| CpuFloorError(text.chars().take(80).collect()))
    }
}

impl fmt::Display for CpuFloor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_is_a_percentage() {
        let floor: CpuFloor = "20".parse().unwrap();
        assert_eq!((floor.to_string(), floor.share()), ("20%".to_owned(), 0.2));
        assert_eq!(serde_json::to_value(floor).unwrap(), 20);
        assert_eq!("100".parse(), Ok(CpuFloor::ALL));
        for wrong in ["0", "101", "300", "-1", "", "20%", "2.5"] {
            let error = wrong.parse::<CpuFloor>().unwrap_err().to_string();
            assert!(error.contains("1 to 100"), "{wrong}: {error}");
        }
        for wrong in [0, 101, 300] {
            assert!(serde_json::from_value::<CpuFloor>(wrong.into()).is_err(), "{wrong}");
        }
    }
}
