//! Contests with a neighbour.

use std::time::Duration;

use lab::guest::GuestSpec;
use lab::hosts::Link;
use lab_guest::orders::Orders;

use super::{MB, MIB, Scenario, Slowing, plain, variant};
use crate::contender::{Mode, Options};
use crate::neighbour::Neighbour;

/// Content per second, in bytes: what the neighbour's clients request, and what that leaves of 1
/// Gbit/s.
const WEB_BYTES_PER_S: u64 = 75 * MB;
const SPARE_BYTES_PER_S: u64 = 44 * MB;

/// The contest in which a neighbour uses one of two NICs.
pub(crate) const NEIGHBOUR_NICS: &str = "neighbour-nics";
/// The contest in which a second VM stays on the source's host.
pub(crate) const NEIGHBOUR_VM: &str = "neighbour-vm";

/// Droveway with a CPU floor, in percent.
fn floor(percent: u32) -> Options {
    variant(&format!("floor-{percent}"), &["--cpu-floor", &percent.to_string()])
}

/// Contests with a neighbour that should not suffer.
pub(super) fn neighbours() -> Vec<Scenario> {
    let orders = Orders {
        random_bytes: 500 * MB / 4096 * 4096,
        working_set_bytes: 64 * MIB,
        rate: 5 * MB,
        seed: 6,
        ..Orders::default()
    };
    let scenario = |name, about, neighbour| Scenario {
        name,
        about,
        guest: GuestSpec::new("bench", "1G", orders.clone()),
        disk: None,
        neighbour: Some(neighbour),
        link: Link::one(1000),
        goal: Duration::from_millis(300),
        timeout: Duration::from_secs(90),
        modes: &[Mode::Multifd],
        ours: plain(),
        plain_tcp: false,
        slowing: None,
        served: false,
        libvirt: false,
    };
    let web = Neighbour::Web { bytes_per_s: WEB_BYTES_PER_S };
    let half = Neighbour::Web { bytes_per_s: WEB_BYTES_PER_S / 2 };
    vec![
        Scenario {
            modes: &[Mode::Multifd, Mode::Limited { bytes_per_s: SPARE_BYTES_PER_S }],
            ours: vec![
                Options { nic_speeds: true, ..Options::default() },
                variant("learning", &[]),
            ],
            ..scenario(
                "neighbour-net",
                "1 GiB with 500 MB random beside a web server that sends 75 MB/s over the same \
                 1 Gbit/s",
                web,
            )
        },
        Scenario {
            link: Link { nics: 2, mbit_per_s: Some(500) },
            ours: vec![
                Options { nic_speeds: true, ..Options::default() },
                variant("learning", &[]),
            ],
            ..scenario(
                NEIGHBOUR_NICS,
                "the same over two NICs of 500 Mbit/s each, one of which a web server shares",
                half,
            )
        },
        Scenario {
            guest: GuestSpec::new(
                "bench",
                "1G",
                Orders {
                    random_bytes: 100 * MB / 4096 * 4096,
                    working_set_bytes: 128 * MIB,
                    rate: 60 * MB,
                    ..orders.clone()
                },
            ),
            modes: &[Mode::Multifd, Mode::AutoConverge],
            ours: vec![
                Options { nic_speeds: true, ..Options::default() },
                Options { nic_speeds: true, ..variant("yields", &["--reserve-min", "30M"]) },
            ],
            slowing: Some(Slowing { patience: Duration::from_secs(90) }),
            ..scenario(
                "neighbour-yields",
                "1 GiB whose guest writes 60 MB/s beside a web server that sends 75 MB/s over the \
                 same 1 Gbit/s",
                web,
            )
        },
        Scenario {
            ours: vec![Options::default(), floor(5), floor(20)],
            ..scenario(
                NEIGHBOUR_VM,
                "1 GiB with 500 MB random beside a VM whose memcached is used, 1 Gbit/s",
                Neighbour::Vm,
            )
        },
        Scenario {
            modes: &[Mode::Precopy, Mode::Multifd, Mode::Relay],
            ours: vec![
                Options::default(),
                variant("raw", &["--compress", "off"]),
                floor(5),
                floor(20),
            ],
            ..scenario(
                "neighbour-cpu",
                "1 GiB with 500 MB random beside a program that keeps all CPUs busy, 1 Gbit/s",
                Neighbour::Computing,
            )
        },
    ]
}
