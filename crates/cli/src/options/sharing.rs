//! The VMs that a moving VM shares content with, as typed.

use api::{Share, Sharing};
use clap::{Args as ClapArgs, ValueEnum};
use serde::Deserialize;

#[derive(Debug, ClapArgs)]
pub(crate) struct SharingArgs {
    /// Which VMs of the same sharing domain may provide pages with the same content, so
    /// that these need not be sent
    #[arg(long, value_enum, default_value_t = ShareArg::Auto)]
    pub(crate) share: ShareArg,
    /// The VM's sharing domain from now on: only VMs of the same domain share content
    /// [default: the one that it has]
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
    /// As far as both hosts are configured for it, if it can help: with a rack, or VMs of
    /// the same domain at the destination
    Auto,
    /// None
    Off,
    /// Those on the destination host, and those that are arriving there
    Host,
    /// Those on all hosts of its rack
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
