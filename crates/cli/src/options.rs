//! How VMs are moved: the options as typed and as a plan file has them, with the API's defaults
//! for the rest.

pub(crate) mod words;

use std::str::FromStr;

use api::{
    Audit, BitRate, Bounds, Compress, CpuFloor, Cpus, FromStorage, GangOptions, HelperBudget,
    OnStall, Priority, ReadDisks, Share, Sharing, Slowing, TapChoice, Throttle,
};
use clap::Args as ClapArgs;
use client::Problem;
use serde::{Deserialize, Deserializer};

use self::words::one_of;

/// How a VM is moved, alone or as one of a gang; each option is optional. A plan file has the
/// flags' names as keys.
#[derive(Debug, Default, ClapArgs, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct MoveOptions {
    /// Data connections [default: one per core up to 8, at least one per network card]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: Option<u16>,
    /// The downtime goal, in milliseconds [default: 300]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    downtime_ms: Option<u64>,
    /// How long a VM may stand still before its move is taken back, in seconds
    /// [default: ten times --downtime-ms, at least 3]
    #[arg(long, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    blackout_max: Option<u64>,
    /// Whether a VM that writes faster than its memory can be sent is throttled: auto, as far
    /// as needed; off; or so that it dirties this share of what can be delivered, such as 0.7
    /// [default: auto]
    #[arg(long, value_name = "auto|off|C")]
    #[serde(deserialize_with = "text")]
    throttle: Option<Throttle>,
    /// The percentage of its CPU time that a throttled VM keeps in any case [default: 20]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    throttle_floor: Option<u8>,
    /// How many seconds after the start of its move a VM is to have arrived; it is throttled as
    /// far as that takes, but not below its floor
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    deadline: Option<u64>,
    /// What to do with a VM that does not converge even at its floor [default: cancel;
    /// with --throttle off, keep]
    #[arg(long, value_parser = one_of::<OnStall>(words::ON_STALL))]
    on_stall: Option<OnStall>,
    /// How memory is compressed [default: auto]
    #[arg(long, value_parser = one_of::<Compress>(words::COMPRESS))]
    compress: Option<Compress>,
    /// Which kind of migration stream QEMU is to send [default: auto]
    #[arg(long, value_parser = one_of::<TapChoice>(words::TAP))]
    tap: Option<TapChoice>,
    /// Don't check that the hosts see the same storage. If they don't, the data of VMs is
    /// destroyed
    #[arg(long)]
    shared_disks: bool,
    /// Disks to move with a VM: all that are local to its host, or some by name. The others
    /// must be on storage that the hosts see
    #[arg(long, value_name = "all|NAME,...")]
    disks: Option<String>,
    /// With --disks: create the images at the destination where there are none
    #[arg(long)]
    create_disks: bool,
    /// How long a move may take until its commit, in seconds; after that it ends, and the VM
    /// stays [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    /// The most that a migration sends, headers included, in bits per second, such as 200M or
    /// 1.5G [default: what others leave of the network cards]
    #[arg(long, value_name = "RATE")]
    #[serde(deserialize_with = "text")]
    limit: Option<BitRate>,
    // Typed, it is an option of gangs only.
    #[arg(skip)]
    #[serde(deserialize_with = "text")]
    pub(crate) limit_total: Option<BitRate>,
    /// What a migration gets even if others want everything, in bits per second
    #[arg(long, value_name = "RATE")]
    #[serde(deserialize_with = "text")]
    reserve: Option<BitRate>,
    /// What other traffic keeps of each network card, in bits per second, if a VM would have
    /// to be throttled, or would miss --deadline, with what others leave [default: all that
    /// it uses]
    #[arg(long, value_name = "RATE")]
    #[serde(deserialize_with = "text")]
    reserve_min: Option<BitRate>,
    /// The scheduling priority of data threads [default: low]
    #[arg(long, value_parser = one_of::<Priority>(words::PRIORITY))]
    priority: Option<Priority>,
    /// The percentage of the CPU time that data threads need which they get among other
    /// threads; beyond it they run on idle CPUs only. 100: always among others [default: the
    /// source agent's --cpu-floor]
    #[arg(long, value_name = "PERCENT", conflicts_with = "disks")]
    cpu_floor: Option<CpuFloor>,
    /// The CPUs that data threads run on, at source and destination, such as 0-3,8
    #[arg(long, value_name = "LIST")]
    cpus: Option<Cpus>,
    /// Which VMs of the same sharing domain may provide pages with the same content, so
    /// that these need not be sent [default: auto]
    #[arg(long, value_parser = one_of::<Share>(words::SHARE))]
    share: Option<Share>,
    /// The sharing domain from now on: only VMs of the same domain share content [default: the
    /// one that a VM has]
    #[arg(long, value_name = "LABEL")]
    share_domain: Option<String>,
    /// Whether the destination reads page cache from the disks of a VM, where the helper in the
    /// guest reports that they have the same content [default: auto]
    #[arg(long, value_parser = one_of::<ReadDisks>(words::STORAGE))]
    storage: Option<ReadDisks>,
    /// The most that is read from storage for a VM, in bits per second: 500M, 2G
    #[arg(long, value_name = "RATE")]
    #[serde(deserialize_with = "text")]
    storage_limit: Option<BitRate>,
    /// What the helper may use in the guest: a share of one CPU, time, memory; each part is
    /// optional [default: cpu=50%,time=10s,memory=32M]
    #[arg(long, value_name = "cpu=N%,time=Ns,memory=NM")]
    #[serde(deserialize_with = "text")]
    helper_budget: Option<HelperBudget>,
    /// Move a VM even to a host with less free memory than its RAM
    #[arg(long)]
    overcommit_memory: bool,
    /// Move a VM even if its QEMU loses writes of the guest meanwhile: one older than 9.0,
    /// under TCG
    #[arg(long)]
    accept_lost_writes: bool,
    /// Move a VM even to a host where a tap of its network cards is missing, or down
    #[arg(long)]
    accept_missing_taps: bool,
    /// What is compared before the source releases a VM [default: on]
    #[arg(long, value_parser = one_of::<Audit>(words::AUDIT))]
    audit: Option<Audit>,
}

/// Deserializes a value from the text that would be typed.
fn text<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

impl MoveOptions {
    /// These options, with those that are missing taken from `other`.
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
            limit_total: self.limit_total.or(other.limit_total),
            reserve: self.reserve.or(other.reserve),
            reserve_min: self.reserve_min.or(other.reserve_min),
            priority: self.priority.or(other.priority),
            cpu_floor: self.cpu_floor.or(other.cpu_floor),
            cpus: self.cpus.or(other.cpus),
            share: self.share.or(other.share),
            share_domain: self.share_domain.or(other.share_domain),
            storage: self.storage.or(other.storage),
            storage_limit: self.storage_limit.or(other.storage_limit),
            helper_budget: self.helper_budget.or(other.helper_budget),
            overcommit_memory: self.overcommit_memory || other.overcommit_memory,
            accept_lost_writes: self.accept_lost_writes || other.accept_lost_writes,
            accept_missing_taps: self.accept_missing_taps || other.accept_missing_taps,
            audit: self.audit.or(other.audit),
        }
    }

    /// Refuses an option that does nothing without another one, which a plan file may have: clap
    /// sees only what is typed.
    pub(crate) fn check(self) -> Result<Self, Problem> {
        if self.create_disks && self.disks.is_none() {
            let text = "--create-disks needs --disks: name the disks to move, or all";
            return Err(Problem::Typed(text.to_owned()));
        }
        Ok(self)
    }
}

impl From<MoveOptions> for GangOptions {
    fn from(options: MoveOptions) -> Self {
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
                reserve_min_bits_per_s: options.reserve_min,
                priority: options.priority.unwrap_or_default(),
                cpu_floor: options.cpu_floor,
                cpus: options.cpus,
            },
            limit_total_bits_per_s: options.limit_total,
            overcommit_memory: options.overcommit_memory,
            accept_lost_writes: options.accept_lost_writes,
            accept_missing_taps: options.accept_missing_taps,
            audit: options.audit.unwrap_or_default(),
            sharing: Sharing {
                share: options.share.unwrap_or_default(),
                domain: options.share_domain,
                // Set in the request for each VM of a gang.
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
    fn each_word_is_one_of_the_apis() {
        let command = MoveOptions::augment_args(clap::Command::new("move"));
        let mut words = 0;
        for option in command.get_arguments().filter(|it| it.get_action().takes_values()) {
            for value in option.get_possible_values() {
                let typed = format!("--{}={}", option.get_long().unwrap(), value.get_name());
                command.clone().try_get_matches_from(["move", &typed]).unwrap();
                words += 1;
            }
        }
        assert!(words > 20, "{words}");
    }

    #[test]
    fn options_that_are_left_out_have_the_apis_defaults() {
        assert_eq!(GangOptions::from(MoveOptions::default()), GangOptions::default());
    }

    #[test]
    fn typed_options_override_the_plan_file() {
        let typed = MoveOptions {
            downtime_ms: Some(50),
            throttle: Some(Throttle::Off),
            shared_disks: true,
            ..MoveOptions::default()
        };
        let file = MoveOptions {
            downtime_ms: Some(500),
            throttle_floor: Some(40),
            limit: Some("200M".parse().unwrap()),
            ..MoveOptions::default()
        };
        let options = GangOptions::from(typed.or(file));
        assert_eq!((options.downtime_ms, options.shared_disks), (50, true));
        assert_eq!(
            options.slowing,
            Slowing { throttle: Throttle::Off, floor: 0.4, ..Slowing::default() }
        );
        assert_eq!(options.bounds.limit_bits_per_s, Some("200M".parse().unwrap()));
    }

    #[test]
    fn images_are_made_only_for_disks_that_move() {
        let all = || MoveOptions { disks: Some("all".to_owned()), ..MoveOptions::default() };
        let create = || MoveOptions { create_disks: true, ..MoveOptions::default() };
        let said = create().check().unwrap_err().to_string();
        assert!(said.contains("needs --disks"), "{said}");
        for options in [all(), create().or(all()), all().or(create())] {
            assert_eq!(options.check().unwrap().disks.as_deref(), Some("all"));
        }
    }
}
