//! Predicts a migration with a model of pre-copy.
//!
//! A pass sends what got dirty during the pass before; the first sends all of RAM. If less gets
//! dirty in a pass than it sends, passes get shorter until the remainder fits into the downtime.
//! This is section 3 of "Optimizing the live migration of virtual machine by CPU scheduling" (Jin
//! et al.), whose equations are named below, with two corrections:
//!
//! - A guest rewrites a bounded set of pages, so what gets dirty in a pass is bounded. If the
//!   guest writes faster than the path delivers, the remainder is not all of RAM, but the part of
//!   the working set that the path can't keep up with.
//! - A QEMU that is held (`chase`) sends a page soon after it got dirty, in quick passes, and not
//!   once in each whole pass.

use std::time::Duration;

use crate::chase::pool_bytes;

/// The shortest time that a quick pass takes.
const QUICK_PASS_S: f64 = 0.1;
/// Limits the time of a prediction, not its result.
const QUICK_PASSES_MAX: u32 = 100_000;

/// The VM, as far as it matters to pre-copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vm {
    /// RAM that the first pass sends.
    pub ram_bytes: u64,
    /// Its working set, which it writes over and over. None if it is not known: then RAM is the
    /// bound.
    pub working_set_bytes: Option<u64>,
}

impl Vm {
    /// Bytes that get dirty in this time. Pages of a working set are assumed to be written in
    /// random order: the more of it is dirty, the more writes hit pages that are already dirty.
    #[must_use]
    fn dirtied(self, dirty_bytes_per_s: f64, seconds: f64) -> f64 {
        let written = dirty_bytes_per_s * seconds;
        match self.working_set_bytes {
            Some(0) => 0.0,
            Some(set) => set as f64 * -(-written / set as f64).exp_m1(),
            None => written.min(self.ram_bytes as f64),
        }
    }
}

/// The kind of passes after the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// Each pass sends what got dirty during the whole pass before, as in the paper: for a QEMU
    /// that can't be held.
    Whole,
    /// After the second pass, pages are sent as they get dirty: for a QEMU that is held.
    Quick,
}

/// The path that pages take, and when the remainder is small enough.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Path {
    /// Guest bytes delivered per second (the paper's B).
    pub bytes_per_s: f64,
    /// Passes allowed, including the one during the downtime (N).
    pub passes_max: u32,
    /// What may be left for the downtime (h).
    pub threshold_bytes: u64,
    /// The kind of passes.
    pub passes: Passes,
}

/// The prediction for a migration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Passes, including the one during the downtime (equation 2); all `Quick` ones count as one.
    pub passes: u32,
    /// Time from its beginning to the end of the downtime (equations 1 and 3).
    pub total: Duration,
    /// The duration of the first pass.
    pub first_pass: Duration,
    /// Guest bytes sent.
    pub bytes: u64,
    /// Bytes left for the downtime.
    pub left_bytes: u64,
    /// The time to move them. Device state and load are not included.
    pub blackout: Duration,
    /// Whether the remainder is small enough.
    pub met: bool,
}

/// Predicts a migration of a VM whose dirty rate in each pass, counted from 1, is given by
/// `dirty_bytes_per_s`; `Quick` passes use the third.
#[must_use]
pub fn predict(vm: Vm, path: Path, dirty_bytes_per_s: impl Fn(u32) -> f64) -> Prediction {
    let rate = path.bytes_per_s.max(1.0);
    let first_s = vm.ram_bytes as f64 / rate;
    let mut run = Run { seconds: first_s, bytes: vm.ram_bytes as f64, passes: 1 };
    let mut left = vm.dirtied(dirty_bytes_per_s(1), first_s);
    let whole_passes = match path.passes {
        Passes::Whole => path.passes_max,
        Passes::Quick => path.passes_max.min(3),
    };
    while left > path.threshold_bytes as f64 && run.passes + 1 < whole_passes {
        let seconds = left / rate;
        run.add(seconds, left);
        left = vm.dirtied(dirty_bytes_per_s(run.passes), seconds);
    }
    if path.passes == Passes::Quick && left > path.threshold_bytes as f64 {
        let seconds;
        (seconds, left) = follow(vm, path, left, dirty_bytes_per_s(3));
        run.add(seconds, seconds * rate);
    }
    run.add(left / rate, left);
    Prediction {
        passes: run.passes,
        total: duration(run.seconds),
        first_pass: duration(first_s),
        bytes: whole(run.bytes),
        left_bytes: whole(left),
        blackout: duration(left / rate),
        met: left <= path.threshold_bytes as f64,
    }
}

/// What was sent so far.
struct Run {
    seconds: f64,
    bytes: f64,
    passes: u32,
}

impl Run {
    fn add(&mut self, seconds: f64, bytes: f64) {
        self.seconds += seconds;
        self.bytes += bytes;
        self.passes += 1;
    }
}

/// How long dirty pages are chased, and what is left then.
///
/// While QEMU is held, a pass ends as soon as all dirty pages are in the pool. A page that gets
/// dirty again while it waits there isn't sent twice. The remainder approaches what the path can't
/// keep up with, `W (1 - B / p)`, plus a bit for what doesn't fit into the pool. The chase is given
/// up when as many bytes were sent as in the whole passes allowed.
fn follow(vm: Vm, path: Path, mut left: f64, dirty_bytes_per_s: f64) -> (f64, f64) {
    let rate = path.bytes_per_s.max(1.0);
    let pool = pool_bytes(Some(rate), 0, u64::MAX) as f64;
    let set = vm.working_set_bytes.unwrap_or(vm.ram_bytes).max(1) as f64;
    let in_vain_s = f64::from(path.passes_max.saturating_sub(2)) * left / rate;
    let (mut seconds, mut passes) = (0.0, 0);
    while left > path.threshold_bytes as f64 && seconds < in_vain_s && passes < QUICK_PASSES_MAX {
        let pass_s = ((left - pool) / rate).max(QUICK_PASS_S);
        let dirtied = vm.dirtied(dirty_bytes_per_s, pass_s);
        let waits = (left - rate * pass_s).max(0.0);
        let again = if vm.working_set_bytes.is_some() { waits * dirtied / set } else { 0.0 };
        left = (dirtied + waits - again).min(set);
        seconds += pass_s;
        passes += 1;
    }
    (seconds, left)
}

/// Guest bytes that a path for `bytes_per_s` delivers per second, if lanes encode them to `share` of
/// their size and can encode this many of them. Lanes that would only lose by it send them as they
/// are.
#[must_use]
pub fn encoded_rate(bytes_per_s: f64, share: f64, encoded_bytes_per_s: f64) -> f64 {
    (bytes_per_s / share.max(SHARE_LEAST)).min(encoded_bytes_per_s).max(bytes_per_s)
}

/// No content is encoded to less: headers and tables remain.
const SHARE_LEAST: f64 = 0.01;

/// The largest ratio of the dirty rate to the path's rate with which a VM of `ram_bytes` has at
/// most `threshold_bytes` left after this many passes (equation 5).
#[must_use]
pub fn boundary(ram_bytes: u64, threshold_bytes: u64, passes_max: u32) -> f64 {
    if threshold_bytes >= ram_bytes {
        return 1.0;
    }
    let passes = f64::from(passes_max.saturating_sub(1).max(1));
    (threshold_bytes as f64 / ram_bytes as f64).powf(1.0 / passes)
}

/// A guest's write rate and its working set, from the rates at which pages got dirty over two
/// intervals, with each page counted once. None: as far as the rates tell, it always writes to new
/// pages, or it wrote much less in the longer one, so that they don't belong together, and only
/// their mean says what it does over a longer time.
#[must_use]
pub fn working_set(rates: [f64; 2], seconds: [f64; 2]) -> (f64, Option<u64>) {
    let [short, long] = rates.map(|rate| rate.max(0.0));
    // In a longer time no fewer pages of a set get dirty than in a shorter one.
    let is_burst = long * seconds[1] < short * seconds[0] * BURST;
    if is_burst {
        let watched_s = seconds[0] + seconds[1];
        return ((short * seconds[0] + long * seconds[1]) / watched_s, None);
    }
    if short <= 0.0 || long >= short * NO_SET {
        return (short.max(long), None);
    }
    // The ratio of the rates, by how many times the set is written per second.
    let ratio = |times: f64| {
        let dirty = |seconds: f64| -(-times * seconds).exp_m1() / seconds;
        dirty(seconds[1]) / dirty(seconds[0])
    };
    let (mut low, mut high) = TIMES;
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if ratio(middle) > long / short { low = middle } else { high = middle }
    }
    let set = short * seconds[0] / -(-low * seconds[0]).exp_m1();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let bytes = set as u64;
    (set * low, Some(bytes))
}

/// Rates closer to each other than this say nothing about a set.
const NO_SET: f64 = 0.95;
/// If less than this part of what got dirty in the shorter interval did so in the longer one, the
/// guest has changed what it does. Samples of a small set may be off by a third.
const BURST: f64 = 0.5;
/// Times per second that a set can be written and still be distinguished from one that is written
/// all the time.
const TIMES: (f64, f64) = (1e-3, 20.0);
/// Enough for the precision of any sample.
const HALVINGS: u32 = 40;

/// The prediction for a VM that may be throttled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throttled {
    /// The prediction for the migration.
    pub prediction: Prediction,
    /// Share of its CPU that the VM keeps after the second pass.
    pub share: f64,
    /// Work that throttling costs, as time of the VM at full speed. The downtime costs more.
    pub work_lost: Duration,
}

/// Predicts a migration in which the VM is throttled to a share of its CPU time after the second
/// pass, when its write rate is known.
#[must_use]
pub fn predict_throttled(vm: Vm, path: Path, dirty_bytes_per_s: f64, share: f64) -> Throttled {
    let slowed = |pass| dirty_bytes_per_s * if pass <= 2 { 1.0 } else { share };
    let prediction = predict(vm, path, slowed);
    let first_s = vm.ram_bytes as f64 / path.bytes_per_s.max(1.0);
    let second_s = vm.dirtied(dirty_bytes_per_s, first_s) / path.bytes_per_s.max(1.0);
    let others = duration(first_s + second_s) + prediction.blackout;
    let later = prediction.total.saturating_sub(others);
    let work_lost = later.mul_f64((1.0 - share).clamp(0.0, 1.0));
    Throttled { prediction, share, work_lost }
}

/// Longer than any migration; invalid values become this too.
const SECONDS_MAX: f64 = 1e9;

fn duration(seconds: f64) -> Duration {
    Duration::from_secs_f64(if seconds >= 0.0 { seconds.min(SECONDS_MAX) } else { SECONDS_MAX })
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(bytes: f64) -> u64 {
    bytes as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    /// The paper's example: 800 MB, 200 Mbit/s, 256 kB, 30 passes.
    const PAPER_VM: Vm = Vm { ram_bytes: 800 * MIB, working_set_bytes: None };
    const PAPER_PATH: Path = Path {
        bytes_per_s: 25e6,
        passes_max: 30,
        threshold_bytes: 256 << 10,
        passes: Passes::Whole,
    };

    fn mbit(bits: f64) -> f64 {
        bits * 1e6 / 8.0
    }

    #[test]
    fn the_boundary_of_the_papers_example() {
        let boundary = boundary(800 * MIB, 256 << 10, 30);
        assert!((boundary * 200.0 - 151.4).abs() < 0.05, "{boundary}");
        assert!(predict(PAPER_VM, PAPER_PATH, |_| mbit(151.4)).met);
        assert!(!predict(PAPER_VM, PAPER_PATH, |_| mbit(151.5)).met);
    }

    #[test]
    fn the_blackout_grows_fast_beyond_the_boundary_up_to_all_of_ram() {
        let blackout = |rate| predict(PAPER_VM, PAPER_PATH, |_| mbit(rate)).blackout.as_secs_f64();
        assert!(blackout(151.4) < 0.0106);
        assert!(blackout(170.0) > 10.0 * blackout(150.0));
        let all = 800.0 * MIB as f64 / 25e6;
        for rate in [200.0, 400.0] {
            assert!((blackout(rate) - all).abs() < 1e-6, "{rate}: {}", blackout(rate));
        }
    }

    #[test]
    fn time_and_bytes_are_the_sums_over_passes() {
        // At half the rate: 1 + 1/2 + ... + 1/2^(n-1), until 800 MB / 2^(n-1) fit.
        let half = predict(PAPER_VM, PAPER_PATH, |_| 12.5e6);
        assert_eq!(half.passes, 13);
        let sum = 2.0 - 0.5f64.powi(12);
        let times_sent = |one: Prediction| one.bytes as f64 / PAPER_VM.ram_bytes as f64;
        assert!((times_sent(half) - sum).abs() < 1e-6);
        let first_s = 800.0 * MIB as f64 / 25e6;
        assert!((half.total.as_secs_f64() - sum * first_s).abs() < 1e-6);
        // A rate for each pass: half, all of RAM again, next to nothing.
        let rates = [12.5e6, 50e6, 5e3];
        let each = predict(PAPER_VM, PAPER_PATH, |pass| rates[pass as usize - 1]);
        assert_eq!((each.passes, each.met), (4, true));
        assert!((times_sent(each) - 2.5002).abs() < 1e-6);
    }

    #[test]
    fn an_idle_vm_takes_two_passes_and_one_without_ram_nothing() {
        let idle = predict(PAPER_VM, PAPER_PATH, |_| 0.0);
        assert_eq!((idle.passes, idle.blackout, idle.met), (2, Duration::ZERO, true));
        let none = Vm { ram_bytes: 0, working_set_bytes: Some(0) };
        for passes in [Passes::Whole, Passes::Quick] {
            let path = Path { bytes_per_s: 0.0, passes, ..PAPER_PATH };
            assert!(predict(none, path, |_| 1e9).met);
        }
    }

    #[test]
    fn a_fast_writer_leaves_the_part_of_its_set_that_the_path_cant_keep_up_with() {
        let vm = Vm { ram_bytes: 800 * MIB, working_set_bytes: Some(128 * MIB) };
        let left = |passes, times: f64| {
            let path = Path { threshold_bytes: 6_000_000, passes, ..PAPER_PATH };
            let prediction = predict(vm, path, |_| times * 25e6);
            (prediction.left_bytes as f64 / (128 * MIB) as f64, prediction.met)
        };
        // Whole passes: x = 1 - exp(-x p / B). Quick ones: 1 - B / p and a bit.
        for (times, at_least, whole) in [(2.0, 0.5, 0.797), (4.0, 0.75, 0.980)] {
            let (share, met) = left(Passes::Whole, times);
            assert!((share - whole).abs() < 0.001 && !met, "{times}: {share}");
            let (share, met) = left(Passes::Quick, times);
            assert!((at_least..whole).contains(&share) && !met, "{times}: {share}");
        }
        for times in [0.25, 0.5, 0.8] {
            assert!(left(Passes::Quick, times).1 && left(Passes::Whole, times).1);
        }
    }

    #[test]
    fn quick_passes_meet_the_goal_sooner_than_whole_ones() {
        for set in [None, Some(128 * MIB)] {
            let vm = Vm { ram_bytes: 800 * MIB, working_set_bytes: set };
            for times in [0.1, 0.5, 0.7] {
                let [whole, quick] = [Passes::Whole, Passes::Quick].map(|passes| {
                    let path = Path { threshold_bytes: 6_000_000, passes, ..PAPER_PATH };
                    predict(vm, path, |_| times * 25e6)
                });
                assert!(whole.met && quick.met);
                let longer = quick.total.as_secs_f64() / whole.total.as_secs_f64();
                assert!(longer < 1.02, "{set:?} {times}: {longer}");
            }
        }
    }

    #[test]
    fn a_lower_share_loses_less_work_and_ends_sooner() {
        // All writes go to clean pages, above the boundary.
        let vm = Vm { ram_bytes: 512 * MIB, working_set_bytes: None };
        for passes in [Passes::Whole, Passes::Quick] {
            let path = Path { threshold_bytes: 6_000_000, passes, ..PAPER_PATH };
            for times in [1.5, 2.0, 4.0] {
                let at = |ratio: f64| predict_throttled(vm, path, times * 25e6, ratio / times);
                let [low, middle, high] = [0.2, 0.4, 0.7].map(at);
                assert!(low.prediction.met && middle.prediction.met && high.prediction.met);
                assert!(low.work_lost < middle.work_lost && middle.work_lost < high.work_lost);
                assert!(low.prediction.total < middle.prediction.total);
                assert!(middle.prediction.total < high.prediction.total);
            }
            // A VM that is not throttled loses nothing by it.
            let free = predict_throttled(vm, path, 10e6, 1.0);
            assert_eq!(free.prediction, predict(vm, path, |_| 10e6));
            assert_eq!(free.work_lost, Duration::ZERO);
        }
    }

    #[test]
    fn encoding_delivers_more_as_far_as_it_can_keep_up() {
        for (share, encoded, expected) in [
            (0.5, 1e9, 50e6),
            (0.5, 30e6, 30e6),
            (0.5, 10e6, 25e6),
            (1.0, 1e9, 25e6),
            (0.0, 1e12, 2.5e9),
        ] {
            let rate = encoded_rate(25e6, share, encoded);
            assert!((rate / expected - 1.0).abs() < 1e-9, "{share} {encoded}: {rate}");
        }
    }

    #[test]
    fn two_rates_give_the_working_set() {
        let seconds = [1.0, 3.0];
        for (rate, set) in [(50e6, 64e6), (120e6, 128e6), (10e6, 100e6)] {
            let dirty = |seconds: f64| set * (1.0 - (-rate * seconds / set).exp()) / seconds;
            let (told, told_set) = working_set(seconds.map(dirty), seconds);
            assert!((told / rate - 1.0).abs() < 0.01, "{told} of {rate}");
            assert!((told_set.unwrap() as f64 / set - 1.0).abs() < 0.01, "{told_set:?} of {set}");
        }
        assert_eq!(working_set([50e6, 50e6], seconds), (50e6, None));
        assert_eq!(working_set([50e6, 60e6], seconds), (60e6, None));
        assert_eq!(working_set([0.0, 0.0], seconds), (0.0, None));
        // The set is written as fast as can be distinguished: the rate is at least the observed
        // one.
        let (told, set) = working_set([90e6, 30e6], seconds);
        assert!(told >= 90e6 && set.unwrap() >= 89_000_000, "{told} {set:?}");
        assert_eq!(working_set([f64::NAN, f64::NAN], seconds).1, None);
        // A burst in the first second is no set that is written twenty times a second.
        for (long, mean) in [(0.0, 22.5e6), (2e6, 24e6), (14e6, 33e6)] {
            assert_eq!(working_set([90e6, long], seconds), (mean, None), "{long}");
        }
        assert!(working_set([90e6, 16e6], seconds).1.is_some(), "the samples may be off");
    }
}
