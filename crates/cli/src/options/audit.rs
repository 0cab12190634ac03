//! The audit before the source gives a VM up, as typed.

use api::Audit;
use clap::ValueEnum;
use serde::Deserialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AuditArg {
    /// Nothing
    Off,
    /// Each page as it was placed, with what QEMU handed over
    On,
    /// Also the destination's RAM, read back
    Deep,
}

impl From<AuditArg> for Audit {
    fn from(arg: AuditArg) -> Self {
        match arg {
            AuditArg::Off => Self::Off,
            AuditArg::On => Self::On,
            AuditArg::Deep => Self::Deep,
        }
    }
}
