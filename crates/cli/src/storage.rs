//! Pages that a VM's disks have: as it is typed.

use api::{BitRate, FromStorage, ReadDisks};
use clap::{Args as ClapArgs, ValueEnum};

#[derive(Debug, ClapArgs)]
pub(crate) struct StorageArgs {
    /// Whether the destination reads pages from the VM's disks that have the same
    /// content, by what the helper in the guest says
    #[arg(long, value_enum, default_value_t = StorageArg::Off)]
    pub(crate) storage: StorageArg,
    /// The most that is read from storage, in bits per second: 500M, 2G
    #[arg(long, value_name = "RATE")]
    pub(crate) storage_limit: Option<BitRate>,
}

impl From<StorageArgs> for FromStorage {
    fn from(args: StorageArgs) -> Self {
        Self { read: args.storage.into(), limit: args.storage_limit }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StorageArg {
    /// It does not
    Off,
    /// Where the guest has a helper and the disks can be read
    Auto,
}

impl From<StorageArg> for ReadDisks {
    fn from(arg: StorageArg) -> Self {
        match arg {
            StorageArg::Off => Self::Off,
            StorageArg::Auto => Self::Auto,
        }
    }
}
