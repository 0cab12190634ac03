//! Contests whose guests write faster than the link.

use std::time::Duration;

use lab_guest::orders::Orders;

use super::scenario::{Scenario, Slowing, variant};
use super::visitors::KEPT_BYTES;
use crate::contender::{Mode, Options};
use lab::guest::GuestSpec;
use lab::hosts::Link;

const MIB: u64 = 1 << 20;
const MBIT: f64 = 1e6 / 8.0;

/// Timeouts of contenders that throttle no guest, and of the others: QEMU takes some ten passes
/// until it has throttled a guest enough.
const PATIENCE: Duration = Duration::from_secs(60);
const TIMEOUT: Duration = Duration::from_secs(150);

/// One point of a sweep.
pub struct Point {
    /// Rate of the link in each direction.
    pub link_mbit_per_s: u32,
    /// Rate of the guest's writes, as a share of the link's.
    pub dirty_of_link: f64,
    /// The contest at this point.
    pub scenario: Scenario,
}

impl Point {
    /// Its name, such as `500x2`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}x{}", self.link_mbit_per_s, self.dirty_of_link)
    }
}

/// The same contest at several points.
pub struct Sweep {
    /// Its name: `make bench-NAME`.
    pub name: &'static str,
    /// What it measures, for people.
    pub about: &'static str,
    /// Its points.
    pub points: Vec<Point>,
    /// After this time no round begins but the first.
    pub enough: Duration,
}

/// All sweeps.
#[must_use]
pub fn sweeps() -> Vec<Sweep> {
    vec![writer()]
}

/// Links, and the rates of writers as shares of theirs. An emulated guest can't write faster.
const LINKS: [(u32, &[f64]); 3] = [
    (200, &[0.25, 0.5, 1.0, 2.0, 4.0, 8.0]),
    (500, &[0.25, 0.5, 1.0, 2.0, 4.0]),
    (1000, &[0.5, 1.0, 2.0]),
];

/// Three links, each with writers from less than its rate to several times its rate.
fn writer() -> Sweep {
    let points = LINKS.into_iter().flat_map(|(mbit, shares)| {
        shares.iter().map(move |share| Point {
            link_mbit_per_s: mbit,
            dirty_of_link: *share,
            scenario: at(mbit, *share),
        })
    });
    Sweep {
        name: "writer",
        about: "512 MiB, a writer that uses a whole CPU, from 0.25 to 8 times links of 200, 500 \
                and 1,000 Mbit/s",
        points: points.collect(),
        // Some three rounds.
        enough: Duration::from_secs(120 * 60),
    }
}

/// The working set takes 2.7 s at 200 Mbit/s and 2.2 s at the others: nine and seven times the
/// downtime goal, so that no contender gets by with stopping the VM for all of it, and short enough
/// that a pass over it ends soon. It is written in random order: with any other, the result would
/// depend on whether the writer or the migration is ahead in its pass.
fn at(mbit: u32, dirty_of_link: f64) -> Scenario {
    let working_set_bytes = match mbit {
        0..500 => 64 * MIB,
        500..1000 => 128 * MIB,
        _ => 256 * MIB,
    };
    let mut ours = vec![off(), slowing(dirty_of_link)];
    if mbit == 500 && dirty_of_link == 2.0 {
        ours.extend(["60", "70", "80", "90"].map(constant));
    }
    if mbit == 1000 && dirty_of_link == 2.0 {
        ours.extend(["60", "75", "90"].map(constant));
    }
    let orders = Orders {
        working_set_bytes,
        rate: rate(mbit, dirty_of_link),
        burn: true,
        seed: 8,
        ..Orders::default()
    };
    slowed("writer", "", orders, mbit, ours)
}

/// A guest that writes hard, and rests.
pub(super) fn swing() -> Scenario {
    let orders = Orders {
        working_set_bytes: 128 * MIB,
        rate: rate(500, 2.0),
        burn: true,
        swing_ms: 5000,
        seed: 9,
        ..Orders::default()
    };
    let about = "512 MiB, a writer at 2 times the link of 500 Mbit/s for 5 s, then 5 s of rest";
    slowed("swing", about, orders, 500, vec![off(), slowing(2.0)])
}

/// A guest that changes 64 bytes in each of many pages, as databases and counters do, and
/// makes pages dirty at twice the link's rate by that.
pub(super) fn rewrite() -> Scenario {
    let orders = Orders {
        working_set_bytes: 128 * MIB,
        rate: rate(500, 2.0),
        parts: true,
        seed: 12,
        ..Orders::default()
    };
    let about = "512 MiB, 128 MiB of them in pages of which 64 bytes change at a time, dirty at 2 \
                 times the link of 500 Mbit/s";
    Scenario {
        modes: &[Mode::Precopy, Mode::Zstd, Mode::Xbzrle, Mode::AutoConverge],
        ..slowed("rewrite", about, orders, 500, vec![off(), slowing(2.0)])
    }
}

/// A server whose clients change its values faster than the link carries them. QEMU's precopy,
/// which would never end, stops the VM for the rest after half a minute, as the paper's did after
/// so many passes; so does ours.
pub(super) fn web() -> Scenario {
    let orders = Orders {
        random_bytes: 32 * MIB,
        serve_bytes: KEPT_BYTES * 2,
        seed: 10,
        ..Orders::default()
    };
    let about = "512 MiB, memcached keeping 96 MiB that four clients on a third host change and read; \
                 200 Mbit/s for the migration";
    let off = variant("off", &["--throttle", "off", "--on-stall", "stop"]);
    Scenario {
        modes: &[Mode::PrecopyUntil { seconds: 30 }, Mode::AutoConverge],
        served: true,
        libvirt: false,
        ..slowed("web", about, orders, 200, vec![off, slowing(4.0)])
    }
}

/// The contest that lasts until all requests are answered.
pub(super) const REQUESTS: &str = "requests";
/// A tenth of the paper's.
pub(super) const REQUESTS_COUNT: u64 = 80_000;

/// The same server and clients; what counts is when a fixed number of requests is answered.
pub(super) fn requests() -> Scenario {
    let about = "the guest and clients of web: when are 80,000 requests answered, with a migration \
                 and without?";
    Scenario { name: REQUESTS, about, ..web() }
}

fn slowed(
    name: &'static str,
    about: &'static str,
    orders: Orders,
    mbit: u32,
    ours: Vec<Options>,
) -> Scenario {
    Scenario {
        name,
        about,
        guest: GuestSpec::new("bench", "512M", orders),
        disk: None,
        neighbour: None,
        link: Link::one(mbit),
        goal: Duration::from_millis(300),
        timeout: TIMEOUT,
        modes: &[Mode::Precopy, Mode::AutoConverge],
        ours,
        plain_tcp: false,
        slowing: Some(Slowing { patience: PATIENCE }),
        served: false,
        libvirt: false,
    }
}

/// Bytes per second.
fn rate(mbit: u32, dirty_of_link: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes")]
    let rate = (f64::from(mbit) * MBIT * dirty_of_link) as u64;
    rate
}

/// Throttles nothing, and continues until it is ended.
fn off() -> Options {
    variant("off", &["--throttle", "off", "--on-stall", "keep"])
}

/// Throttles the guest as far as needed; down to 5 % where 20 % may not be enough.
fn slowing(dirty_of_link: f64) -> Options {
    let floor: &[&str] = if dirty_of_link < 4.0 { &[] } else { &["--throttle-floor", "5"] };
    Options { variant: None, ..variant("", floor) }
}

/// Aims at so many hundredths of the rate that can be delivered.
fn constant(percent: &'static str) -> Options {
    variant(&format!("c{percent}"), &["--throttle", &format!("0.{percent}")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_contender_of_requests_does_not_move() {
        let scenario = requests();
        assert_eq!(scenario.requests(), Some(REQUESTS_COUNT));
        assert!(scenario.about.contains("80,000"));
        let names: Vec<_> = scenario.contenders().iter().map(|one| one.name()).collect();
        assert!(names.contains(&crate::contender::STAYS.to_owned()), "{names:?}");
        assert_eq!(names.len(), 1 + web().contenders().len());
    }

    #[test]
    fn the_sweep_has_every_rate_and_the_constants_at_one() {
        let sweep = writer();
        let names: Vec<_> = sweep.points.iter().map(Point::name).collect();
        assert_eq!(names.len(), 14);
        for name in ["200x0.25", "200x8", "500x4", "1000x2"] {
            assert!(names.contains(&name.to_owned()), "{name}");
        }
        let fast = sweep.points.last().expect("points");
        assert_eq!(fast.scenario.guest.orders.rate, 250_000_000);
        let of = |point: &Point| point.scenario.contenders().len();
        let counts: Vec<_> = sweep.points.iter().map(of).collect();
        assert_eq!(counts, [4, 4, 4, 4, 4, 4, 4, 4, 4, 8, 4, 4, 4, 7]);
    }

    #[test]
    fn contenders_that_throttle_no_guest_have_less_time() {
        let scenario = at(200, 1.0);
        for (name, timeout) in [
            ("qemu-precopy", PATIENCE),
            ("droveway-off", PATIENCE),
            ("qemu-autoconverge", TIMEOUT),
            ("droveway-c60", TIMEOUT),
        ] {
            assert_eq!(scenario.timeout_of(name), timeout, "{name}");
        }
    }
}
