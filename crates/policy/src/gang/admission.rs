//! Decides which VMs of a gang may start to move now.
//!
//! A host has a number of slots for VMs that leave, and as many for VMs that arrive; a moving VM
//! takes one of each. A VM that is about to finish gives up its slots, so that the next one can
//! start its QEMU and connect its lanes while the link drains. At each end at most one VM more than
//! there are slots may move, so that VMs that never finish don't pile up.

use std::cmp::Reverse;
use std::collections::HashMap;

/// With more at a time, each VM has so little of the link that it can't keep up with its own
/// writes.
pub const PARALLEL_MAX: usize = 16;
/// A migration that ends within this time is about to finish: preparing the next one takes about as
/// long.
const LANDING_S: f64 = 2.0;

/// The stage of a gang's VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It has not started.
    Waiting,
    /// It moves.
    Flying,
    /// It moves, and is about to finish.
    Landing,
    /// It has arrived, or stays at the source.
    Over,
}

/// One VM of a gang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move<'m> {
    /// Its name.
    pub vm: &'m str,
    /// The host that it leaves.
    pub from: &'m str,
    /// The host that it goes to.
    pub to: &'m str,
    /// Bytes that have to cross the network.
    pub bytes: u64,
    /// Its stage.
    pub stage: Stage,
}

/// Whether a migration is about to finish.
#[must_use]
pub fn is_landing(is_stopped: bool, time_left_s: Option<f64>) -> bool {
    is_stopped || time_left_s.is_some_and(|left| left <= LANDING_S)
}

/// The moves in one direction at a host.
#[derive(Clone, Copy, Debug, Default)]
struct End {
    flying: usize,
    landing: usize,
}

impl End {
    fn has_place(self, parallel: usize) -> bool {
        self.flying < parallel && self.flying + self.landing <= parallel
    }

    fn busy(self) -> usize {
        self.flying + self.landing
    }
}

/// The VMs that may start now, in the order in which they start: those between the least busy hosts
/// first, and of these the largest, so that no long move is left for the end.
#[must_use]
pub fn admit(moves: &[Move<'_>], parallel: usize) -> Vec<usize> {
    let parallel = parallel.clamp(1, PARALLEL_MAX);
    let mut leaving: HashMap<&str, End> = HashMap::new();
    let mut arriving: HashMap<&str, End> = HashMap::new();
    for one in moves {
        for end in [leaving.entry(one.from).or_default(), arriving.entry(one.to).or_default()] {
            match one.stage {
                Stage::Flying => end.flying += 1,
                Stage::Landing => end.landing += 1,
                Stage::Waiting | Stage::Over => {}
            }
        }
    }
    let mut waiting: Vec<usize> =
        (0..moves.len()).filter(|&n| moves[n].stage == Stage::Waiting).collect();
    let mut admitted = Vec::new();
    loop {
        let ends = |n: usize| [leaving[moves[n].from], arriving[moves[n].to]];
        let may =
            waiting.iter().copied().filter(|&n| ends(n).iter().all(|e| e.has_place(parallel)));
        let rank = |&n: &usize| {
            let busy: usize = ends(n).iter().map(|end| end.busy()).sum();
            (busy, Reverse(moves[n].bytes), moves[n].vm, n)
        };
        let Some(next) = may.min_by_key(rank) else { return admitted };
        waiting.retain(|&n| n != next);
        for end in [leaving.entry(moves[next].from), arriving.entry(moves[next].to)] {
            end.or_default().flying += 1;
        }
        admitted.push(next);
    }
}

#[cfg(test)]
mod tests {
    use super::Stage::{Flying, Landing, Over, Waiting};
    use super::*;

    fn one(vm: &'static str, from: &'static str, to: &'static str, stage: Stage) -> Move<'static> {
        Move { vm, from, to, bytes: 1, stage }
    }

    fn admitted(moves: &[Move<'static>], parallel: usize) -> Vec<&'static str> {
        admit(moves, parallel).into_iter().map(|n| moves[n].vm).collect()
    }

    #[test]
    fn both_ends_have_places() {
        let all = [
            one("a", "x", "y", Waiting),
            one("b", "x", "z", Waiting),
            one("c", "w", "y", Waiting),
            one("d", "w", "z", Waiting),
        ];
        assert_eq!(admitted(&all, 1), ["a", "d"], "c and b wait for an end each");
        assert_eq!(admitted(&all, 2), ["a", "d", "b", "c"]);
        assert_eq!(admitted(&all, 0), admitted(&all, 1));
        let busy = [one("e", "x", "y", Flying), one("f", "v", "u", Over)];
        let moves: Vec<_> = all.iter().chain(&busy).copied().collect();
        assert_eq!(admitted(&moves, 1), ["d"]);
    }

    #[test]
    fn the_largest_goes_first_and_hosts_with_least_to_do() {
        let sized = |vm, to, bytes| Move { bytes, ..one(vm, "x", to, Waiting) };
        let all = [sized("a", "y", 1), sized("b", "y", 5), sized("c", "z", 3), sized("d", "z", 3)];
        assert_eq!(admitted(&all, 1), ["b"]);
        // After b, z is idle and y is busy.
        assert_eq!(admitted(&all, 2), ["b", "c"]);
    }

    /// Moves at x, and how many more may start there.
    #[test]
    fn a_move_that_is_about_to_finish_lets_one_more_start() {
        for (under_way, parallel, more) in [
            (vec![Landing], 1, 1),
            (vec![Landing, Flying], 1, 0),
            // Moves that never finish don't pile up.
            (vec![Landing, Landing], 1, 0),
            (vec![Landing, Landing], 2, 1),
            (vec![Landing, Flying], 2, 1),
            (vec![Flying, Flying], 2, 0),
            (vec![Landing, Landing, Flying], 2, 0),
            (vec![Over, Over], 1, 1),
        ] {
            let mut moves: Vec<_> =
                under_way.iter().map(|stage| one("f", "x", "y", *stage)).collect();
            moves.extend([one("a", "x", "y", Waiting), one("b", "x", "y", Waiting)]);
            assert_eq!(admit(&moves, parallel).len(), more, "{under_way:?} by {parallel}");
        }
    }

    #[test]
    fn what_ends_soon_is_landing() {
        for (stopped, left, landing) in [
            (true, None, true),
            (false, None, false),
            (false, Some(0.5), true),
            (false, Some(30.0), false),
            (false, Some(f64::NAN), false),
        ] {
            assert_eq!(is_landing(stopped, left), landing, "{stopped} {left:?}");
        }
    }

    /// A rack of four hosts is emptied into another. In each step, every VM that moves gets its
    /// share of its host's link.
    #[test]
    fn all_vms_arrive_and_no_link_is_crowded_or_idle() {
        const STEP_BYTES: u64 = 12;
        let sources = ["s0", "s1", "s2", "s3"];
        let targets = ["t0", "t1", "t2", "t3"];
        let names: Vec<String> = (0..40).map(|n| format!("v{n:02}")).collect();
        let mut left: Vec<u64> = (0..40).map(|n| 40 + 13 * (n % 7)).collect();
        let mut moves: Vec<Move<'_>> = (0..40)
            .map(|n| Move {
                vm: &names[n],
                from: sources[n % 4],
                to: targets[(n / 4) % 4],
                bytes: left[n],
                stage: Waiting,
            })
            .collect();
        let total: u64 = left.iter().sum();
        let mut steps = 0;
        while moves.iter().any(|one| one.stage != Over) {
            for n in admit(&moves, 2) {
                moves[n].stage = Flying;
            }
            let at = |host: &str, moves: &[Move<'_>]| {
                let here = |one: &&Move<'_>| one.from == host || one.to == host;
                let moving = |one: &&Move<'_>| matches!(one.stage, Flying | Landing);
                moves.iter().filter(moving).filter(here).count()
            };
            for host in sources.iter().chain(&targets) {
                assert!(at(host, &moves) <= 3, "{host} is crowded");
            }
            let shares: Vec<u64> = moves
                .iter()
                .map(|one| STEP_BYTES / at(one.from, &moves).max(at(one.to, &moves)).max(1) as u64)
                .collect();
            for (n, one) in moves.iter_mut().enumerate() {
                if !matches!(one.stage, Flying | Landing) {
                    continue;
                }
                left[n] = left[n].saturating_sub(shares[n]);
                one.stage = match left[n] {
                    0 => Over,
                    rest if rest <= 2 * STEP_BYTES => Landing,
                    _ => Flying,
                };
            }
            steps += 1;
            assert!(steps < 10_000, "it has no end");
        }
        // The time that four links take if they are never idle.
        let least = total / (4 * STEP_BYTES);
        assert!(steps * 2 < least * 3, "{steps} steps, {least} at the least");
    }
}
