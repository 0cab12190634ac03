//! How QEMU's stream is tapped and sent, as typed.

use api::{Compress, TapChoice};
use clap::ValueEnum;
use serde::Deserialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CompressArg {
    /// Whatever delivers more
    Auto,
    Off,
    Lz4,
    Zstd,
}

impl From<CompressArg> for Compress {
    fn from(arg: CompressArg) -> Self {
        match arg {
            CompressArg::Auto => Self::Auto,
            CompressArg::Off => Self::Off,
            CompressArg::Lz4 => Self::Lz4,
            CompressArg::Zstd => Self::Zstd,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TapArg {
    /// Multifd where QEMU and the VM's devices allow it
    Auto,
    Multifd,
    Classic,
}

impl From<TapArg> for TapChoice {
    fn from(arg: TapArg) -> Self {
        match arg {
            TapArg::Auto => Self::Auto,
            TapArg::Multifd => Self::Multifd,
            TapArg::Classic => Self::Classic,
        }
    }
}
