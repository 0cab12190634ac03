//! How VMs of a gang are moved: what was typed, what a plan file says, and what
//! both leave to the agent.

use std::str::FromStr;

use api::{
    Audit, BitRate, Bounds, Compress, Cpus, FromStorage, GangOptions, HelperBudget, OnStall,
    Priority, ReadDisks, Share, Sharing, Slowing, TapChoice, Throttle,
};
use serde::{Deserialize, Deserializer};

use super::args::HowArgs;

/// Each may be left out. In a file: the flags' names.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct Options {
    pub(crate) lanes: Option<u16>,
    pub(crate) downtime_ms: Option<u64>,
    pub(crate) blackout_max: Option<u64>,
    #[serde(deserialize_with = "text")]
    pub(crate) throttle: Option<Throttle>,
    pub(crate) throttle_floor: Option<u8>,
    pub(crate) deadline: Option<u64>,
    pub(crate) on_stall: Option<OnStall>,
    pub(crate) compress: Option<Compress>,
    pub(crate) tap: Option<TapChoice>,
    pub(crate) shared_disks: bool,
    pub(crate) disks: Option<String>,
    pub(crate) create_disks: bool,
    pub(crate) timeout: Option<u64>,
    #[serde(deserialize_with = "text")]
    pub(crate) limit: Option<BitRate>,
    #[serde(deserialize_with = "text")]
    pub(crate) reserve: Option<BitRate>,
    pub(crate) priority: Option<Priority>,
    pub(crate) cpus: Option<Cpus>,
    pub(crate) share: Option<Share>,
    pub(crate) share_domain: Option<String>,
    pub(crate) storage: Option<ReadDisks>,
    #[serde(deserialize_with = "text")]
    pub(crate) storage_limit: Option<BitRate>,
    #[serde(deserialize_with = "text")]
    pub(crate) helper_budget: Option<HelperBudget>,
    pub(crate) overcommit_memory: bool,
    pub(crate) audit: Option<Audit>,
}

/// As it is typed.
fn text<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

impl From<HowArgs> for Options {
    fn from(args: HowArgs) -> Self {
        Self {
            lanes: args.lanes,
            downtime_ms: args.downtime_ms,
            blackout_max: args.blackout_max,
            throttle: args.throttle,
            throttle_floor: args.throttle_floor,
            deadline: args.deadline,
            on_stall: args.on_stall.map(OnStall::from),
            compress: args.compress.map(Compress::from),
            tap: args.tap.map(TapChoice::from),
            shared_disks: args.shared_disks,
            disks: args.disks,
            create_disks: args.create_disks,
            timeout: args.timeout,
            limit: args.limit,
            reserve: args.reserve,
            priority: args.priority.map(Priority::from),
            cpus: args.cpus,
            share: args.share.map(Share::from),
            share_domain: args.share_domain,
            storage: args.storage.map(ReadDisks::from),
            storage_limit: args.storage_limit,
            helper_budget: args.helper_budget,
            overcommit_memory: args.overcommit_memory,
            audit: args.audit.map(Audit::from),
        }
    }
}

impl Options {
    /// The same; what it leaves out as the other says.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            lanes: self.lanes.or(other.lanes),
            downtime_ms: self.downtime_ms.or(other.downtime_ms),
            blackout_max: self.blackout_max.or(other.blackout_max),
            throttle: self.throttle.or(other.throttle),
            throttle_floor: self.throttle_floor.or(other.throttle_floor),
            deadline: self.deadline.or(other.deadline),
            on_stall: self.on_stall.or(other.on_stall),
            compress: self.compress.or(other.compress),
            tap: self.tap.or(other.tap),
            shared_disks: self.shared_disks || other.shared_disks,
            disks: self.disks.or(other.disks),
            create_disks: self.create_disks || other.create_disks,
            timeout: self.timeout.or(other.timeout),
            limit: self.limit.or(other.limit),
            reserve: self.reserve.or(other.reserve),
            priority: self.priority.or(other.priority),
            cpus: self.cpus.or(other.cpus),
            share: self.share.or(other.share),
            share_domain: self.share_domain.or(other.share_domain),
            storage: self.storage.or(other.storage),
            storage_limit: self.storage_limit.or(other.storage_limit),
            helper_budget: self.helper_budget.or(other.helper_budget),
            overcommit_memory: self.overcommit_memory || other.overcommit_memory,
            audit: self.audit.or(other.audit),
        }
    }
}

impl From<Options> for GangOptions {
    fn from(options: Options) -> Self {
        let defaults = Self::default();
        let slowing = Slowing::default();
        Self {
            lanes: options.lanes,
            downtime_ms: options.downtime_ms.unwrap_or(defaults.downtime_ms),
            blackout_max_s: options.blackout_max,
            slowing: Slowing {
                throttle: options.throttle.unwrap_or(slowing.throttle),
                floor: options
                    .throttle_floor
                    .map_or(slowing.floor, |percent| f64::from(percent) / 100.0),
                deadline_s: options.deadline,
                on_stall: options.on_stall,
            },
            compress: options.compress.unwrap_or_default(),
            tap: options.tap.unwrap_or_default(),
            shared_disks: options.shared_disks,
            disks: options.disks,
            create_disks: options.create_disks,
            timeout_s: options.timeout,
            bounds: Bounds {
                limit_bits_per_s: options.limit,
                reserve_bits_per_s: options.reserve,
                priority: options.priority.unwrap_or_default(),
                cpus: options.cpus,
            },
            overcommit_memory: options.overcommit_memory,
            audit: options.audit.unwrap_or_default(),
            sharing: Sharing {
                share: options.share.unwrap_or_default(),
                domain: options.share_domain,
                // The request for each VM says so.
                together: false,
            },
            storage: FromStorage {
                read: options.storage.unwrap_or_default(),
                limit: options.storage_limit,
                share: None,
                helper: options.helper_budget.unwrap_or_default(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_as_the_api_has_it() {
        assert_eq!(GangOptions::from(Options::from(HowArgs::default())), GangOptions::default());
    }

    #[test]
    fn what_is_typed_wins() {
        let typed = HowArgs {
            downtime_ms: Some(50),
            throttle: Some(Throttle::Off),
            shared_disks: true,
            ..HowArgs::default()
        };
        let file = Options {
            downtime_ms: Some(500),
            throttle_floor: Some(40),
            limit: Some("200M".parse().unwrap()),
            ..Options::default()
        };
        let options = GangOptions::from(Options::from(typed).or(file));
        assert_eq!((options.downtime_ms, options.shared_disks), (50, true));
        assert_eq!(
            options.slowing,
            Slowing { throttle: Throttle::Off, floor: 0.4, ..Slowing::default() }
        );
        assert_eq!(options.bounds.limit_bits_per_s, Some("200M".parse().unwrap()));
    }
}
