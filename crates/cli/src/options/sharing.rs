//! With whom a VM that moves shares content: as it is typed.

use api::{Share, Sharing};
use clap::{Args as ClapArgs, ValueEnum};
use serde::Deserialize;

#[derive(Debug, ClapArgs)]
pub(crate) struct SharingArgs {
    /// Where pages may come from that need not be sent, because a VM of the same
    /// sharing domain has the same content
    #[arg(long, value_enum, default_value_t = ShareArg::Auto)]
    pub(crate) share: ShareArg,
    /// The VM's sharing domain from now on: only VMs of the same one have content in
    /// common [default: the one that it has]
    #[arg(long, value_name = "LABEL")]
    pub(crate) share_domain: Option<String>,
}

impl From<SharingArgs> for Sharing {
    fn from(args: SharingArgs) -> Self {
        Self { share: args.share.into(), domain: args.share_domain, together: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ShareArg {
    /// As far as both hosts are configured for it, if there is anything to find: a
    /// rack, or VMs of the same domain at the destination
    Auto,
    /// From nowhere
    Off,
    /// From VMs on the destination host, and those on their way there
    Host,
    /// From those of all hosts of its rack
    Rack,
}

impl From<ShareArg> for Share {
    fn from(arg: ShareArg) -> Self {
        match arg {
            ShareArg::Auto => Self::Auto,
            ShareArg::Off => Self::Off,
            ShareArg::Host => Self::Host,
            ShareArg::Rack => Self::Rack,
        }
    }
}
