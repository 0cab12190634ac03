//! The bottleneck of a migration, as its progress shows it.

use std::time::Duration;

use api::Limit;
use policy::effort;

/// A guest that dirties more than this fraction of the delivered rate is the
/// bottleneck of a later pass.
const GUEST_DIRTIES: f64 = 0.8;
/// Lanes that write more than this fraction of the operator's limit could write
/// more without it. Below it something else slows them.
const NEAR_CAP: f64 = 0.85;

/// If the destination takes nothing for more than this fraction of the time that lanes spend in
/// writes, ...
const FOR_PEER: f64 = 0.5;
/// ... over so much of that time, the network is not the bottleneck. The kernel's part of it is
/// read now and then.
const PEER_TIME: Duration = Duration::from_secs(4);

/// For what part of the time in writes the destination took nothing, lately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PeerShare {
    writing_s: f64,
    for_peer_s: f64,
}

impl PeerShare {
    /// Adds a window.
    pub(crate) fn add(&mut self, writing: Duration, for_peer: Duration) {
        self.writing_s += writing.as_secs_f64();
        self.for_peer_s += for_peer.as_secs_f64();
        if self.writing_s > PEER_TIME.as_secs_f64() {
            self.writing_s /= 2.0;
            self.for_peer_s /= 2.0;
        }
    }

    fn is_much(self) -> bool {
        self.for_peer_s > FOR_PEER * self.writing_s
    }
}

/// The figures that decide it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// The first pass has ended.
    pub(crate) later: bool,
    /// The guest's dirty rate.
    pub(crate) dirty_bytes_per_s: f64,
    /// The rate that can be delivered, if known.
    pub(crate) bodies_per_s: Option<f64>,
    /// How lanes spend their time.
    pub(crate) lanes: effort::Sample,
    /// The destination's storage is waited for: disk blocks wait for room there, or pages are read
    /// from it.
    pub(crate) storage: bool,
    /// How long the destination takes nothing.
    pub(crate) peer: PeerShare,
    /// QEMU is read more slowly than possible.
    pub(crate) held: bool,
    /// The rate at which lanes write.
    pub(crate) wire_bytes_per_s: f64,
    /// The operator's limit on that rate, if any.
    pub(crate) cap_bytes_per_s: Option<f64>,
}

impl Seen {
    /// The bottleneck as the source alone sees it.
    pub(crate) fn at_source(self) -> Limit {
        Self { peer: PeerShare::default(), ..self }.limit()
    }

    pub(crate) fn limit(&self) -> Limit {
        let outruns = |rate: f64| self.dirty_bytes_per_s > GUEST_DIRTIES * rate;
        if self.later && self.bodies_per_s.is_some_and(outruns) {
            return Limit::Guest;
        }
        let effort::Sample { writing, encoding, waiting, .. } = self.lanes;
        let most = writing.max(encoding).max(waiting);
        if most <= 0.0 {
            Limit::Unknown
        } else if self.lanes.lacks_cpu() {
            // Whatever else they appear to wait for.
            Limit::Cpu
        } else if waiting >= most {
            if self.storage { Limit::Disk } else { Limit::Qemu }
        } else if encoding >= most {
            Limit::Cpu
        } else if self.held && !self.later {
            Limit::Hold
        } else if self.cap_bytes_per_s.is_some_and(|cap| self.wire_bytes_per_s > NEAR_CAP * cap) {
            // A paced lane's waiting counts as time in a write.
            Limit::Bound
        } else if self.peer.is_much() {
            if self.storage { Limit::Disk } else { Limit::Cpu }
        } else {
            Limit::Network
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(writing: f64, encoding: f64, waiting: f64) -> effort::Sample {
        effort::Sample {
            writing,
            encoding,
            waiting,
            for_cpu: 0.05,
            running: 0.1,
            delivered_bytes_per_s: 0.0,
            wire_bytes_per_s: 0.0,
        }
    }

    /// A later pass, with lanes that write 10 MB/s most of the time.
    fn writing() -> Seen {
        Seen {
            later: true,
            dirty_bytes_per_s: 1e6,
            bodies_per_s: Some(20e6),
            lanes: lanes(0.8, 0.1, 0.1),
            storage: false,
            peer: PeerShare::default(),
            held: false,
            wire_bytes_per_s: 10e6,
            cap_bytes_per_s: None,
        }
    }

    #[test]
    fn the_activity_that_takes_most_time_is_the_limit() {
        let of = |writing_: f64, encoding: f64, waiting: f64| {
            Seen { lanes: lanes(writing_, encoding, waiting), ..writing() }.limit()
        };
        assert_eq!(of(0.8, 0.1, 0.1), Limit::Network);
        assert_eq!(of(0.3, 0.6, 0.1), Limit::Cpu);
        assert_eq!(of(0.1, 0.3, 0.6), Limit::Qemu);
        assert_eq!(of(0.0, 0.0, 0.0), Limit::Unknown);
        // Pages still flow while blocks wait, or others are read, so storage alone is not the
        // limit.
        let full = Seen { storage: true, ..writing() };
        assert_eq!(full.limit(), Limit::Network);
        assert_eq!(Seen { lanes: lanes(0.1, 0.3, 0.6), ..full }.limit(), Limit::Disk);
        assert_eq!(Seen { later: false, held: true, ..writing() }.limit(), Limit::Hold);
        assert_eq!(Seen { held: true, ..writing() }.limit(), Limit::Network);
        assert_eq!(Seen { dirty_bytes_per_s: 17e6, ..writing() }.limit(), Limit::Guest);
        let first = Seen { later: false, dirty_bytes_per_s: 17e6, ..writing() };
        assert_eq!(first.limit(), Limit::Network);
    }

    #[test]
    fn the_network_is_not_blamed_for_a_destination_that_takes_nothing() {
        let share = |of_10: u64| {
            let mut share = PeerShare::default();
            for _ in 0..100 {
                share.add(Duration::from_millis(100), Duration::from_millis(of_10 * 10));
            }
            share
        };
        let of = |of_10, storage| Seen { peer: share(of_10), storage, ..writing() }.limit();
        assert_eq!(of(1, true), Limit::Network);
        assert_eq!(of(9, true), Limit::Disk, "it reads pages from its storage");
        assert_eq!(of(9, false), Limit::Cpu);
        // That is forgotten.
        let mut was = share(10);
        for _ in 0..100 {
            was.add(Duration::from_millis(100), Duration::ZERO);
        }
        assert_eq!(Seen { peer: was, ..writing() }.limit(), Limit::Network);
    }

    #[test]
    fn lanes_without_a_cpu_wait_for_nothing_else() {
        for (writing_, waiting) in [(0.9, 0.1), (0.1, 0.9)] {
            let lanes = effort::Sample { for_cpu: 0.5, ..lanes(writing_, 0.0, waiting) };
            assert_eq!(Seen { lanes, ..writing() }.limit(), Limit::Cpu);
        }
    }

    #[test]
    fn the_operators_bound_limits_only_lanes_that_reach_it() {
        let of = |cap: f64, seen: Seen| Seen { cap_bytes_per_s: Some(cap), ..seen }.limit();
        assert_eq!(of(10e6, writing()), Limit::Bound);
        assert_eq!(of(11e6, writing()), Limit::Bound);
        // The network provides less than the limit.
        assert_eq!(of(25e6, writing()), Limit::Network);
        assert_eq!(of(10e6, Seen { lanes: lanes(0.1, 0.8, 0.1), ..writing() }), Limit::Cpu);
        assert_eq!(of(10e6, Seen { dirty_bytes_per_s: 17e6, ..writing() }), Limit::Guest);
    }
}
