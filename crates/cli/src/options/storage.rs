//! Pages that are read from the VM's disks, as typed.

use api::{BitRate, FromStorage, HelperBudget, ReadDisks};
use clap::{Args as ClapArgs, ValueEnum};
use serde::Deserialize;

#[derive(Debug, ClapArgs)]
pub(crate) struct StorageArgs {
    /// Whether the destination reads page cache from the VM's disks, where the helper in the
    /// guest reports that they have the same content
    #[arg(long, value_enum, default_value_t = StorageArg::Auto)]
    pub(crate) storage: StorageArg,
    /// The most that is read from storage, in bits per second: 500M, 2G
    #[arg(long, value_name = "RATE")]
    pub(crate) storage_limit: Option<BitRate>,
    /// The percentage of the pages on the VM's disks that is read from them, whatever is
    /// faster: for benchmarks
    #[arg(long, value_name = "PERCENT", hide = true, value_parser = clap::value_parser!(u8).range(..=100))]
    pub(crate) storage_share: Option<u8>,
    /// What the helper may use in the guest: a share of one CPU, time, memory; each part is
    /// optional [default: cpu=50%,time=10s,memory=32M]
    #[arg(long, value_name = "cpu=N%,time=Ns,memory=NM")]
    pub(crate) helper_budget: Option<HelperBudget>,
}

impl From<StorageArgs> for FromStorage {
    fn from(args: StorageArgs) -> Self {
        Self {
            read: args.storage.into(),
            limit: args.storage_limit,
            share: args.storage_share,
            helper: args.helper_budget.unwrap_or_default(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StorageArg {
    /// Where the guest has a helper and the disks can be read
    Auto,
    /// Never
    Off,
    /// As auto, and the report has the reason if pages were not read
    On,
}

impl From<StorageArg> for ReadDisks {
    fn from(arg: StorageArg) -> Self {
        match arg {
            StorageArg::Auto => Self::Auto,
            StorageArg::Off => Self::Off,
            StorageArg::On => Self::On,
        }
    }
}
