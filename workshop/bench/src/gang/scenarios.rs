//! The contests of gangs: the VMs, the racks and the contenders.

use std::time::Duration;

use lab_guest::orders::Orders;
use serde_json::{Value, json};
use simulator::Share;

use super::conditions::Conditions;
use crate::contender::Mode;
use crate::contender::gang::{DrovewayGang, GangContender, Member, QemuGang};
use lab::error::Result;
use lab::guest::GuestSpec;
use lab::hosts::{Layout, RackHost, Racks};
use lab::setup::{self, Kit};

const MIB: u64 = 1 << 20;
const MB: u64 = 1_000_000;

/// Memory of each VM.
pub(crate) const MEMORY: &str = "256M";
/// Seed of the content that all VMs have in common.
const COMMON_SEED: u64 = 77;
const SEED: u64 = 100;
/// Addresses of two VMs: the first answers, the second asks.
const PAIR: [u8; 2] = [21, 22];
/// Idle guests that beat as often as others would not be idle: under TCG each would take a tenth of
/// a core.
const TICK_MS: u64 = 50;
/// Eight guests that wake up a thousand times a second, to write a page each time, take both cores
/// of a small host before anything moves.
const WRITE_STEP_MS: u64 = 10;
/// The seed of a VM that runs in the target rack already.
const RESIDENT_SEED: u64 = 99;

/// A contest.
pub struct GangScenario {
    /// Its name: `make bench-NAME`.
    pub name: &'static str,
    /// What it measures, for people.
    pub about: &'static str,
    /// The racks.
    pub layout: Layout,
    /// Orders of the nth VM, from 0.
    pub orders: fn(u64) -> Orders,
    /// Whether a VM of the same system runs in the target rack already.
    pub resident: bool,
    /// Whether the second VM asks the first one all the time.
    pub pair: bool,
    /// Other load on the core, in bytes of UDP per second.
    pub load_bytes_per_s: Option<u64>,
    /// QEMU's modes that take part.
    pub modes: &'static [Mode],
    /// Droveway's sharing modes that take part.
    pub shares: &'static [Share],
    /// The downtime goal of each VM.
    pub goal: Duration,
    /// When a contender gives up.
    pub timeout: Duration,
}

/// The system, 32 MiB in common with all VMs, and 16 MiB of the VM's own.
fn idle(nth: u64) -> Orders {
    Orders {
        seed: SEED + nth,
        common_seed: COMMON_SEED,
        common_bytes: 32 * MIB,
        random_bytes: 16 * MIB,
        tick_ms: TICK_MS,
        ..Orders::default()
    }
}

/// The same, and the second VM asks the first.
fn apps(nth: u64) -> Orders {
    Orders {
        address: if nth < 2 { PAIR[usize::from(nth == 1)] } else { 0 },
        answers: nth == 0,
        asks: if nth == 1 { PAIR[0] } else { 0 },
        ..idle(nth)
    }
}

/// The same, and the first two VMs compute with all of a CPU, of which they get less while they and
/// others move: that shows in what they write, which is little.
fn computes(nth: u64) -> Orders {
    let computes = nth < 2;
    Orders {
        burn: computes,
        working_set_bytes: if computes { 4 * MIB } else { 0 },
        rate: if computes { MB } else { 0 },
        ..idle(nth)
    }
}

/// The same, and the first two VMs write files.
fn busy(nth: u64) -> Orders {
    let writes = nth < 2;
    Orders {
        file_bytes: if writes { 32 * MIB } else { 0 },
        file_rate: if writes { 4 * MB } else { 0 },
        disk_run: 32,
        ..idle(nth)
    }
}

/// Only the system is in common; each VM writes twice its memory in total.
fn worst(nth: u64) -> Orders {
    Orders {
        seed: SEED + nth,
        random_bytes: 16 * MIB,
        working_set_bytes: 128 * MIB,
        rate: 4 * MB,
        write_max_bytes: 512 * MIB,
        write_step_ms: WRITE_STEP_MS,
        tick_ms: TICK_MS,
        ..Orders::default()
    }
}

impl GangScenario {
    /// All contenders, new.
    #[must_use]
    pub fn contenders(&self) -> Vec<Box<dyn GangContender>> {
        let qemu = self.modes.iter().map(|mode| Box::new(QemuGang::new(*mode)) as Box<_>);
        let shares = self.shares.iter();
        let ours =
            shares.map(|share| Box::new(DrovewayGang::new(*share)) as Box<dyn GangContender>);
        let widest = self.shares.iter().filter(|share| **share == Share::Rack);
        let as_people_do = widest.flat_map(|share| {
            [DrovewayGang::by_one_command(*share), DrovewayGang::by_host(*share)]
        });
        let as_people_do = as_people_do.map(|one| Box::new(one) as Box<dyn GangContender>);
        qemu.chain(ours).chain(as_people_do).collect()
    }

    /// The same under other conditions. Other load on the core is scaled with the links, and slower
    /// links extend the timeout.
    #[must_use]
    pub fn under(self, conditions: &Conditions) -> Self {
        let layout = Layout {
            edge_mbit_per_s: conditions.mbit_per_s(self.layout.edge_mbit_per_s),
            core_mbit_per_s: conditions.mbit_per_s(self.layout.core_mbit_per_s),
            ..self.layout
        };
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "scales are checked"
        )]
        let scaled = |rate: u64| (rate as f64 * conditions.links) as u64;
        Self {
            layout,
            load_bytes_per_s: self.load_bytes_per_s.map(scaled),
            timeout: self.timeout.div_f64(conditions.links.min(1.0)),
            ..self
        }
    }

    /// The nth VM.
    #[must_use]
    pub fn guest(&self, conditions: &Conditions, nth: u64) -> GuestSpec {
        let orders = conditions.orders((self.orders)(nth));
        let kernel_words = conditions.kernel_words();
        GuestSpec { kernel_words, ..GuestSpec::new(&format!("vm{}", nth + 1), MEMORY, orders) }
    }

    /// The VMs, dealt to the source hosts and the target hosts in turn, and the resident one.
    #[must_use]
    pub fn members<'r>(&self, racks: &'r Racks, conditions: &Conditions) -> Vec<Member<'r>> {
        let (sources, targets) = (racks.sources(), racks.targets());
        let vms = 0..u64::from(conditions.vms);
        let gang = vms.zip(sources.into_iter().cycle()).zip(targets.clone().into_iter().cycle());
        let gang = gang.map(|((nth, from), to)| {
            let spec = self.guest(conditions, nth);
            Member { spec, from, to: Some(to) }
        });
        let resident = targets.first().copied().filter(|_| self.resident).map(|host| {
            let orders = conditions.orders(Orders { seed: RESIDENT_SEED, ..idle(0) });
            let kernel_words = conditions.kernel_words();
            let spec = GuestSpec { kernel_words, ..GuestSpec::new("resident", MEMORY, orders) };
            Member { spec, from: host, to: None }
        });
        gang.chain(resident).collect()
    }

    /// Joins the two VMs that talk to each other by a network.
    ///
    /// # Errors
    /// If the hosts can't, or what guests need for a NIC is not available.
    pub fn join_pair(&self, kit: &Kit, racks: &Racks, members: &mut [Member<'_>]) -> Result<()> {
        if !self.pair {
            return Ok(());
        }
        let initrd = setup::server_initrd(kit)?;
        let pair = members.iter_mut().filter(|member| member.spec.orders.address > 0);
        let mut names = Vec::new();
        for Member { spec, .. } in pair {
            names.push(spec.name.clone());
            spec.initrd = Some(initrd.clone());
            spec.extra.extend(RackHost::nic_arguments(&spec.name, spec.orders.address));
        }
        racks.join_vms(&names.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The guests, for the results.
    #[must_use]
    pub fn guest_json(&self, conditions: &Conditions) -> Value {
        let one = |nth: u8| {
            let orders = conditions.orders((self.orders)(nth.into()));
            json!({
                "common_bytes": orders.common_bytes,
                "common_text_bytes": orders.common_text_bytes,
                "random_bytes": orders.random_bytes,
                "text_bytes": orders.text_bytes,
                "working_set_bytes": orders.working_set_bytes,
                "write_bytes_per_s": orders.rate,
                "writes_in_all_bytes": (orders.write_max_bytes > 0).then_some(orders.write_max_bytes),
                "file_bytes": orders.file_bytes,
                "file_bytes_per_s": orders.file_rate,
            })
        };
        json!({
            "vms": conditions.vms,
            "memory": MEMORY,
            "kernel_words": conditions.kernel_words(),
            "each": (0..conditions.vms).map(one).collect::<Vec<_>>(),
            "resident": self.resident,
        })
    }

    /// The links, for the results.
    #[must_use]
    pub fn links_json(&self, conditions: &Conditions, congestion_control: &str) -> Value {
        let layout = &self.layout;
        json!({
            "scale": conditions.links,
            "source_racks": layout.source_racks,
            "hosts_in_each": layout.source_hosts,
            "target_hosts": layout.target_hosts,
            "edge_mbit_per_s": layout.edge_mbit_per_s,
            "core_mbit_per_s": layout.core_mbit_per_s,
            "load_bytes_per_s": self.load_bytes_per_s,
            "congestion_control": congestion_control,
            "downtime_goal_ms": u64::try_from(self.goal.as_millis()).unwrap_or(u64::MAX),
        })
    }
}

/// All contests.
#[must_use]
pub fn all() -> Vec<GangScenario> {
    let idle = |name, about| GangScenario {
        name,
        about,
        layout: Layout::default(),
        orders: idle,
        resident: false,
        pair: false,
        load_bytes_per_s: None,
        modes: &[Mode::Precopy, Mode::Zstd],
        shares: &[Share::Off, Share::Host, Share::Rack],
        goal: Duration::from_millis(300),
        timeout: Duration::from_secs(240),
    };
    vec![
        idle(
            "gang-idle",
            "VMs of 256 MiB, same system, 32 MiB in common and 16 MiB of their own, from two racks \
             to one",
        ),
        GangScenario {
            orders: busy,
            ..idle("gang-busy", "gang-idle with two VMs that write files at 4 MB/s each")
        },
        GangScenario {
            resident: true,
            ..idle("gang-resident", "gang-idle with a VM of the same system in the target rack")
        },
        GangScenario {
            orders: worst,
            modes: &[],
            ..idle(
                "gang-worst",
                "gang-idle with no application data in common, each VM writing twice its memory",
            )
        },
        GangScenario {
            layout: Layout { target_hosts: 3, bystanders: true, ..Layout::default() },
            load_bytes_per_s: Some(50 * MB),
            modes: &[Mode::Precopy, Mode::Zstd],
            shares: &[Share::Off, Share::Rack],
            ..idle(
                "gang-background",
                "gang-idle to three hosts beside 400 Mbit/s of UDP on the core",
            )
        },
        GangScenario {
            orders: apps,
            pair: true,
            modes: &[Mode::Precopy, Mode::Zstd],
            shares: &[Share::Off, Share::Rack],
            ..idle(
                "gang-apps",
                "gang-idle with two VMs that ask and answer each other all the time",
            )
        },
        GangScenario {
            orders: computes,
            shares: &[Share::Off, Share::Rack],
            ..idle("gang-compute", "gang-idle with two VMs that compute with all of a CPU each")
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_have_the_ordered_content_in_common() {
        let of = |name: &str| all().into_iter().find(|one| one.name == name).unwrap();
        let orders = |name: &str| (0..8).map(of(name).orders).collect::<Vec<_>>();
        for name in ["gang-idle", "gang-busy", "gang-resident", "gang-background", "gang-apps"] {
            for (nth, one) in orders(name).iter().enumerate() {
                assert_eq!(one.common_bytes + one.random_bytes, 48 * MIB, "{name}");
                assert_eq!((one.common_seed, one.seed), (COMMON_SEED, SEED + nth as u64));
            }
        }
        let busy = orders("gang-busy").iter().filter(|one| one.file_rate > 0).count();
        assert_eq!(busy, 2);
        let compute = orders("gang-compute").iter().filter(|one| one.burn && one.rate > 0).count();
        assert_eq!(compute, 2);
        for one in orders("gang-worst") {
            assert_eq!((one.common_bytes, one.write_max_bytes), (0, 2 * 256 * MIB));
        }
    }

    #[test]
    fn contenders_are_called_after_what_they_share() {
        let names: Vec<_> = all()[0].contenders().iter().map(|one| one.name()).collect();
        let qemu = ["qemu-precopy", "qemu-zstd"];
        let ours = ["off", "host", "rack", "gang", "evacuate"].map(|one| format!("droveway-{one}"));
        assert_eq!(names, [&qemu.map(str::to_owned)[..], &ours[..]].concat());
        let chooses = all()[0].contenders().iter().filter(|one| one.chooses_hosts()).count();
        assert_eq!(chooses, 1);
    }

    #[test]
    fn links_and_other_load_are_scaled_together() {
        let conditions = Conditions { links: 0.4, ..Conditions::default() };
        let usual = all().into_iter().find(|one| one.load_bytes_per_s.is_some()).unwrap();
        let (layout, timeout) = (usual.layout, usual.timeout);
        let scaled = usual.under(&conditions);
        let expected = Layout { edge_mbit_per_s: 100, core_mbit_per_s: 400, ..layout };
        assert_eq!((scaled.layout, scaled.load_bytes_per_s), (expected, Some(20 * MB)));
        assert!(scaled.timeout > timeout * 2);
    }
}
