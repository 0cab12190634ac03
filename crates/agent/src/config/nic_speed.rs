//! A NIC's speed, as the operator writes it: `10.0.0.1=1G`.

use std::net::IpAddr;
use std::str::FromStr;

use api::BitRate;
use serde::Deserialize;

/// The text is not a NIC's speed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a network card's speed: write ADDR=RATE in bits per second, such as 10.0.0.1=1G"
)]
pub struct NicSpeedError(String);

/// The speed of one NIC in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct NicSpeed {
    /// Its address.
    pub address: IpAddr,
    /// Its speed.
    pub rate: BitRate,
}

impl FromStr for NicSpeed {
    type Err = NicSpeedError;

    fn from_str(text: &str) -> Result<Self, NicSpeedError> {
        let parsed = text.split_once('=').and_then(|(address, rate)| {
            Some(Self { address: address.parse().ok()?, rate: rate.parse().ok()? })
        });
        parsed.ok_or_else(|| NicSpeedError(text.chars().take(80).collect()))
    }
}

impl TryFrom<String> for NicSpeed {
    type Error = NicSpeedError;

    fn try_from(text: String) -> Result<Self, NicSpeedError> {
        text.parse()
    }
}
