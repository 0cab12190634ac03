//! How far content is shared.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

/// The VMs that a VM shares content with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Share {
    /// With no VM.
    Off,
    /// With VMs on the same destination host.
    Host,
    /// With VMs in the same target rack.
    Rack,
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Host => "host",
            Self::Rack => "rack",
        })
    }
}
