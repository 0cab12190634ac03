//! The contests: the guest, the links and the contenders.

mod neighbours;

use std::time::Duration;

use lab_guest::orders::Orders;
use serde_json::{Value, json};

use super::neighbour::Neighbour;
use super::writers::{REQUESTS, REQUESTS_COUNT, requests, rewrite, swing, web};
use crate::contender::{Contender, Droveway, Mode, Options, Qemu, Stays, Virsh, Way, can_compress};
use crate::image::Image;
use lab::guest::GuestSpec;
use lab::hosts::Link;
use lab::setup::Accelerator;
use neighbours::neighbours;
pub(super) use neighbours::{NEIGHBOUR_NICS, NEIGHBOUR_VM};

const MIB: u64 = 1 << 20;
const MB: u64 = 1_000_000;

/// Contenders that never throttle the guest: if it writes too fast, they don't finish.
const UNSLOWED: [&str; 3] = ["qemu-precopy", "qemu-zstd", "droveway-off"];

/// A contest.
pub struct Scenario {
    /// Its name: `make bench-NAME`.
    pub name: &'static str,
    /// What it measures, for people.
    pub about: &'static str,
    /// The guest.
    pub guest: GuestSpec,
    /// Its disk, which moves with it.
    pub disk: Option<Image>,
    /// A load next to it.
    pub neighbour: Option<Neighbour>,
    /// The links.
    pub link: Link,
    /// The downtime goal.
    pub goal: Duration,
    /// When a contender gives up.
    pub timeout: Duration,
    /// QEMU's modes that take part.
    pub modes: &'static [Mode],
    /// Droveway's variants that take part.
    pub ours: Vec<Options>,
    /// Whether a plain TCP stream is measured on the link too.
    pub plain_tcp: bool,
    /// Set if contenders may have to throttle the guest: its loss by that is measured, too.
    pub slowing: Option<Slowing>,
    /// Whether a server runs in the guest, and clients use it.
    pub served: bool,
    /// Whether libvirt moves it, unaided and carried by agents.
    pub libvirt: bool,
}

/// Where guests write faster than the link.
#[derive(Clone, Copy, Debug)]
pub struct Slowing {
    /// When contenders that don't throttle the guest give up.
    pub patience: Duration,
}

impl Scenario {
    /// All contenders, new.
    #[must_use]
    pub fn contenders(&self) -> Vec<Box<dyn Contender>> {
        if self.libvirt {
            let encrypted = self.modes.contains(&Mode::MultifdTls);
            let virsh = if self.name == LIBVIRT_TWINS { Virsh::of_twins } else { Virsh::new };
            let compressed = (!encrypted && can_compress()).then_some(Way::COMPRESSED);
            let ways = Way::all(encrypted).into_iter().chain(compressed);
            return ways.map(|way| Box::new(virsh(way)) as Box<dyn Contender>).collect();
        }
        let stays = self.requests().map(|_| Box::new(Stays::default()) as Box<dyn Contender>);
        let qemu = self.modes.iter().map(|mode| Box::new(Qemu::new(*mode)) as Box<dyn Contender>);
        let ours = self.ours.iter().cloned();
        let ours = ours.map(|options| Box::new(Droveway::new(options)) as Box<dyn Contender>);
        stays.into_iter().chain(qemu).chain(ours).collect()
    }

    /// How many requests the clients of a server have to get answered, if that is measured.
    pub(super) fn requests(&self) -> Option<u64> {
        (self.name == REQUESTS).then_some(REQUESTS_COUNT)
    }

    /// When a contender gives up.
    #[must_use]
    pub fn timeout_of(&self, contender: &str) -> Duration {
        let slows = !UNSLOWED.contains(&contender);
        self.slowing.filter(|_| !slows).map_or(self.timeout, |slowing| slowing.patience)
    }

    /// The guest, for the results.
    #[must_use]
    pub fn guest_json(&self) -> Value {
        let orders = &self.guest.orders;
        json!({
            "memory": self.guest.memory,
            "vcpus": self.guest.vcpus,
            "machine": self.guest.machine,
            "random_bytes": orders.random_bytes,
            "text_bytes": orders.text_bytes,
            "working_set_bytes": orders.working_set_bytes,
            "write_bytes_per_s": orders.rate,
            "uses_a_whole_cpu": orders.burn,
            "writes_and_rests_s": (orders.swing_ms > 0).then(|| orders.swing_ms as f64 / 1e3),
            "serves_bytes": orders.serve_bytes,
            "disk": self.disk.map(|disk| json!({
                "bytes": disk.bytes,
                "guest_bytes": disk.guest_bytes,
                "other_data_bytes": disk.data_bytes,
                "write_bytes_per_s": orders.disk_rate,
                "largest_write_pages": orders.disk_run.max(1),
                "bytes_between_flushes": orders.disk_flush,
            })),
        })
    }

    /// The links, for the results.
    #[must_use]
    pub fn links_json(&self, congestion_control: &str) -> Value {
        json!({
            "nics": self.link.nics,
            "mbit_per_s_each": self.link.mbit_per_s,
            "congestion_control": congestion_control,
            "downtime_goal_ms": u64::try_from(self.goal.as_millis()).unwrap_or(u64::MAX),
        })
    }
}

pub(super) fn plain() -> Vec<Options> {
    vec![Options::default()]
}

pub(super) fn variant(name: &str, arguments: &[&str]) -> Options {
    Options {
        variant: Some(name.to_owned()),
        arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        ..Options::default()
    }
}

/// The same, with certificates.
fn encrypted(options: Options) -> Options {
    Options { variant: Some("tls".to_owned()), tls: true, ..options }
}

/// All contests.
#[must_use]
pub fn all() -> Vec<Scenario> {
    let rest = neighbours().into_iter().chain([cores(), tls(), kvm()]);
    let rest = rest
        .chain([swing(), rewrite(), web(), requests(), footprint()])
        .chain(large())
        .chain(libvirts());
    memory().into_iter().chain(disks()).chain(rest).collect()
}

/// Contests of libvirt: the same guests on the same links.
fn libvirts() -> Vec<Scenario> {
    let named = [
        ("idle", "libvirt-idle"),
        ("nics", "libvirt-nics"),
        ("busy", "libvirt-busy"),
        ("unshaped", "libvirt-unshaped"),
        ("disk", "libvirt-disk"),
        ("tls", "libvirt-tls"),
    ];
    let of = |(base, name): (&str, &'static str)| {
        let all = memory().into_iter().chain(disks()).chain([tls()]);
        let scenario = all.into_iter().find(|one| one.name == base)?;
        Some(Scenario { name, libvirt: true, ..scenario })
    };
    named.into_iter().filter_map(of).chain([libvirt_twins()]).collect()
}

/// Two VMs that libvirt moves at the same time.
const LIBVIRT_TWINS: &str = "libvirt-twins";

fn libvirt_twins() -> Scenario {
    let orders = Orders {
        common_seed: 7,
        common_bytes: 160 * MIB,
        random_bytes: 32 * MIB,
        working_set_bytes: 32 * MIB,
        rate: 2 * MB,
        seed: 1,
        ..Orders::default()
    };
    Scenario {
        name: LIBVIRT_TWINS,
        about: "two VMs of 512 MiB at a time, 160 MiB in common and 64 MiB of their own, one link \
                of 1 Gbit/s",
        guest: GuestSpec::new("bench", "512M", orders),
        disk: None,
        neighbour: None,
        link: Link::one(1000),
        goal: Duration::from_millis(300),
        timeout: Duration::from_secs(90),
        modes: &[],
        ours: Vec::new(),
        plain_tcp: false,
        slowing: None,
        served: false,
        libvirt: true,
    }
}

/// Contests that move only a VM's memory.
fn memory() -> Vec<Scenario> {
    let idle = Orders { working_set_bytes: 64 * MIB, rate: 5 * MB, seed: 1, ..Orders::default() };
    let idle_guest = GuestSpec::new("bench", "1G", idle);
    let goal = Duration::from_millis(300);
    let timeout = Duration::from_secs(90);
    vec![
        Scenario {
            name: "idle",
            about: "1 GiB, 64 MiB random working set, 5 MB/s writes, one link of 1 Gbit/s",
            guest: idle_guest.clone(),
            disk: None,
            neighbour: None,
            link: Link::one(1000),
            goal,
            timeout,
            modes: &[Mode::Precopy, Mode::Multifd, Mode::Zstd],
            ours: vec![
                Options::default(),
                variant("raw", &["--compress", "off"]),
                variant("unaudited", &["--audit", "off"]),
                variant("shared", &["--share", "host"]),
            ],
            plain_tcp: false,
            slowing: None,
            served: false,
            libvirt: false,
        },
        Scenario {
            name: "nics",
            about: "the same over four NICs of 250 Mbit/s each; QEMU can use one address",
            guest: idle_guest,
            disk: None,
            neighbour: None,
            link: Link { nics: 4, mbit_per_s: Some(250) },
            goal,
            timeout,
            modes: &[Mode::Precopy, Mode::Multifd, Mode::Zstd],
            ours: plain(),
            plain_tcp: false,
            slowing: None,
            served: false,
            libvirt: false,
        },
        Scenario {
            name: "busy",
            about: "512 MiB, 128 MiB random working set written at 0.8 of a 500 Mbit/s link",
            guest: GuestSpec::new(
                "bench",
                "512M",
                Orders {
                    working_set_bytes: 128 * MIB,
                    rate: 48 * MB,
                    seed: 2,
                    ..Orders::default()
                },
            ),
            disk: None,
            neighbour: None,
            link: Link::one(500),
            goal,
            timeout,
            modes: &[Mode::Precopy, Mode::Multifd, Mode::Zstd, Mode::AutoConverge],
            ours: plain(),
            plain_tcp: false,
            slowing: None,
            served: false,
            libvirt: false,
        },
        Scenario {
            name: "unshaped",
            about: "1.5 GiB with 1,000 MB random, no shaping: what standing in the path costs",
            guest: GuestSpec::new(
                "bench",
                "1536M",
                Orders { random_bytes: 1000 * MB / 4096 * 4096, seed: 3, ..Orders::default() },
            ),
            disk: None,
            neighbour: None,
            link: Link::unshaped(),
            goal,
            timeout,
            modes: &[Mode::Precopy, Mode::Multifd, Mode::Relay],
            ours: vec![
                Options::default(),
                variant("raw", &["--compress", "off"]),
                variant("raw-unaudited", &["--compress", "off", "--audit", "off"]),
                variant("raw-shared", &["--compress", "off", "--share", "host"]),
                Options {
                    rests: true,
                    ..variant("raw-shared-rested", &["--compress", "off", "--share", "host"])
                },
            ],
            plain_tcp: false,
            slowing: None,
            served: false,
            libvirt: false,
        },
        Scenario {
            name: "line",
            about: "768 MiB with 500 MB random, no compression, 1 Gbit/s, beside one plain TCP stream",
            guest: GuestSpec::new(
                "bench",
                "768M",
                Orders { random_bytes: 500 * MB / 4096 * 4096, seed: 4, ..Orders::default() },
            ),
            disk: None,
            neighbour: None,
            link: Link::one(1000),
            goal,
            timeout,
            modes: &[],
            ours: vec![variant("raw", &["--compress", "off"])],
            plain_tcp: true,
            slowing: None,
            served: false,
            libvirt: false,
        },
    ]
}

/// The rest of a switchover if there is next to nothing to move. Where KVM is nested and only
/// emulates, it can run no guest with an operating system.
fn kvm() -> Scenario {
    let mut guest = GuestSpec::bare(
        "bench",
        "32M",
        Orders {
            random_bytes: 2 * MIB,
            working_set_bytes: MIB,
            rate: 100_000,
            seed: 9,
            repeated: true,
            tick_ms: 5,
            ..Orders::default()
        },
    );
    guest.accelerator = Some(Accelerator::Kvm);
    Scenario {
        name: "kvm",
        about: "32 MiB, nearly idle, without an operating system, under KVM, one link of 1 Gbit/s",
        guest,
        disk: None,
        neighbour: None,
        link: Link::one(1000),
        goal: Duration::from_millis(300),
        timeout: Duration::from_secs(60),
        modes: &[Mode::Precopy, Mode::Multifd],
        ours: plain(),
        plain_tcp: false,
        slowing: None,
        served: false,
        libvirt: false,
    }
}

/// The contest that measures agents' memory.
pub const FOOTPRINT: &str = "footprint";

/// Memory that agents take for a VM that has much and uses little of it.
fn footprint() -> Scenario {
    let orders = Orders {
        random_bytes: 1000 * MB / 4096 * 4096,
        working_set_bytes: 16 * MIB,
        rate: MB,
        seed: 8,
        ..Orders::default()
    };
    Scenario {
        name: FOOTPRINT,
        about: "16 GiB, of which 1,000 MB were touched, one link of 1 Gbit/s: agents' memory",
        guest: GuestSpec::new("bench", "16G", orders),
        disk: None,
        neighbour: None,
        link: Link::one(1000),
        goal: Duration::from_millis(300),
        timeout: Duration::from_secs(180),
        modes: &[Mode::Precopy, Mode::Multifd],
        ours: vec![Options::default(), variant("shared", &["--share", "host"])],
        plain_tcp: false,
        slowing: None,
        served: false,
        libvirt: false,
    }
}

/// Large VMs that use little: 256 MiB of 8 GiB, after 2 GiB were used and freed.
fn large() -> Vec<Scenario> {
    let orders = Orders {
        freed_bytes: 2 << 30,
        working_set_bytes: 256 * MIB,
        rate: MB,
        seed: 9,
        ..Orders::default()
    };
    let of = |name, about, shared: bool, hinted: bool| {
        let mut guest = GuestSpec::new("bench", "8G", orders.clone());
        guest.kernel_words = "init_on_alloc=0";
        if shared {
            guest.machine = "q35,memory-backend=ram".to_owned();
            let ram = ["-object", "memory-backend-memfd,id=ram,size=8G,share=on"];
            guest.extra.extend(ram.map(str::to_owned));
        }
        if hinted {
            // As `droveway run --free-page-hint` adds them.
            let balloon = "virtio-balloon,free-page-hint=on,iothread=balloon";
            let hint = ["-object", "iothread,id=balloon", "-device", balloon];
            guest.extra.extend(hint.map(str::to_owned));
        }
        Scenario {
            name,
            about,
            guest,
            disk: None,
            neighbour: None,
            link: Link::one(1000),
            goal: Duration::from_millis(300),
            timeout: Duration::from_secs(180),
            modes: &[Mode::Multifd, Mode::Zstd],
            ours: plain(),
            plain_tcp: false,
            slowing: None,
            served: false,
            libvirt: false,
        }
    };
    vec![
        of("large-memfd", "8 GiB in a memfd, 2 GiB used and freed, 256 MiB in use", true, false),
        of("large-memfd-hint", "the same, and the guest says what is free", true, true),
        of("large-anonymous", "the same in anonymous memory", false, false),
        of("large-anonymous-hint", "the same, and the guest says what is free", false, true),
    ]
}

/// The cost of encryption.
fn tls() -> Scenario {
    let raw = Options { variant: None, ..variant("", &["--compress", "off"]) };
    Scenario {
        name: "tls",
        about: "1.5 GiB with 1,000 MB random, no compression, no shaping: plain beside encrypted, and QEMU's own TLS",
        guest: GuestSpec::new(
            "bench",
            "1536M",
            Orders { random_bytes: 1000 * MB / 4096 * 4096, seed: 6, ..Orders::default() },
        ),
        disk: None,
        neighbour: None,
        link: Link::unshaped(),
        goal: Duration::from_millis(300),
        timeout: Duration::from_secs(90),
        modes: &[Mode::PrecopyTls, Mode::MultifdTls],
        ours: vec![raw.clone(), encrypted(raw)],
        plain_tcp: false,
        slowing: None,
        served: false,
        libvirt: false,
    }
}

/// Contests that move a host's local disk, too.
fn disks() -> Vec<Scenario> {
    let disk = |guest_bytes| Image {
        bytes: 4096 * MIB,
        guest_bytes,
        data_bytes: 1024 * MIB - guest_bytes,
        seed: 5,
    };
    let idle = Orders { working_set_bytes: 64 * MIB, rate: 5 * MB, seed: 5, ..Orders::default() };
    let ours = Options { variant: None, ..variant("", &["--disks", "all", "--create-disks"]) };
    let guest = |guest_bytes, rate| {
        let orders = Orders {
            disk_bytes: guest_bytes,
            disk_rate: rate,
            disk_run: 32,
            disk_flush: 4 * MIB,
            ..idle.clone()
        };
        GuestSpec::new("bench", "512M", orders)
    };
    let scenario = |name, about, guest_bytes, rate, link| Scenario {
        name,
        about,
        guest: guest(guest_bytes, rate),
        disk: Some(disk(guest_bytes)),
        neighbour: None,
        link,
        goal: Duration::from_millis(300),
        timeout: Duration::from_secs(120),
        modes: &[Mode::Mirror, Mode::MirrorZstd],
        ours: vec![ours.clone()],
        plain_tcp: false,
        slowing: None,
        served: false,
        libvirt: false,
    };
    vec![
        scenario(
            "disk",
            "512 MiB, a disk of 4 GiB with 1 GiB of mixed data, idle; four NICs of 250 Mbit/s",
            64 * MIB,
            0,
            Link { nics: 4, mbit_per_s: Some(250) },
        ),
        scenario(
            "disk-busy",
            "the same with 256 MiB of files rewritten at 20 MB/s, over one link of 1 Gbit/s",
            256 * MIB,
            20 * MB,
            Link::one(1000),
        ),
    ]
}

/// How lanes scale, with compression and without.
fn cores() -> Scenario {
    let orders = Orders {
        random_bytes: 500 * MB / 4096 * 4096,
        text_bytes: 500 * MB / 4096 * 4096,
        seed: 7,
        ..Orders::default()
    };
    let lanes = |count: &str, compress: &str, name: &str| {
        variant(name, &["--lanes", count, "--compress", compress])
    };
    Scenario {
        name: "cores",
        about: "1.5 GiB with 500 MB random and 500 MB text, no shaping: 1, 2 and 4 lanes",
        guest: GuestSpec::new("bench", "1536M", orders),
        disk: None,
        neighbour: None,
        link: Link::unshaped(),
        goal: Duration::from_millis(300),
        timeout: Duration::from_secs(90),
        modes: &[Mode::Multifd],
        ours: vec![
            lanes("1", "off", "1-lane"),
            lanes("2", "off", "2-lanes"),
            lanes("4", "off", "4-lanes"),
            lanes("1", "zstd", "1-lane-zstd"),
            lanes("2", "zstd", "2-lanes-zstd"),
            lanes("4", "zstd", "4-lanes-zstd"),
        ],
        plain_tcp: false,
        slowing: None,
        served: false,
        libvirt: false,
    }
}
