//! What a guest felt while it moved, judged from outside.
//!
//! While QEMU has stopped a guest, the guest's own clocks stand still, and it can't know for how
//! long. So it sends a heartbeat every few ms, and their arrival at the lab counts, by one clock
//! for both hosts. That shows everything: the downtime, a throttled vCPU, a thread of QEMU that
//! holds up the vCPU. It also shows delays of the machine itself, so a gap is never flattering.

use std::time::{Duration, Instant};

/// A beat that arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beat {
    /// When it arrived.
    pub(super) at: Instant,
    /// On which socket; each host has another one.
    pub(super) socket: u32,
    /// Counts until then, in every tenth beat.
    pub(super) written: Option<Written>,
}

/// What a guest has done since it booted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Pages of its memory that it has rewritten.
    pub pages: u64,
    /// Pages of its disk or file that it has rewritten.
    pub disk_pages: u64,
    /// Answers that it has received from another guest.
    pub answers: u64,
    /// Pages of files in its page cache that it has read and written.
    pub touched: u64,
}

/// What a guest felt between two instants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Felt {
    /// The longest silence, beyond the period of its beats.
    pub gap: Duration,
    /// Pages of its memory that it wrote per second.
    pub pages_per_s: f64,
    /// Pages of its disk that it wrote per second.
    pub disk_pages_per_s: f64,
    /// Answers that it received per second.
    pub answers_per_s: f64,
}

/// Judges beats, in order of arrival, of a guest that beats every `period`: that much of a silence
/// doesn't count.
pub(super) fn felt(beats: &[Beat], from: Instant, to: Instant, period: Duration) -> Felt {
    let touching = beats.windows(2).filter(|pair| pair[1].at > from && pair[0].at < to);
    let longest = touching.map(|pair| pair[1].at - pair[0].at).max().unwrap_or_default();
    let counts: Vec<_> = beats.iter().filter_map(|beat| Some((beat.at, beat.written?))).collect();
    // The window, widened to the nearest beats with counts.
    let first = counts.iter().rev().find(|(at, _)| *at <= from).or(counts.first());
    let last = counts.iter().find(|(at, _)| *at >= to).or(counts.last());
    let per_s = |of: fn(&Written) -> u64| match (first, last) {
        (Some((start, before)), Some((end, after))) if end > start => {
            of(after).saturating_sub(of(before)) as f64 / (*end - *start).as_secs_f64()
        }
        _ => 0.0,
    };
    Felt {
        gap: longest.saturating_sub(period),
        pages_per_s: per_s(|written| written.pages),
        disk_pages_per_s: per_s(|written| written.disk_pages),
        answers_per_s: per_s(|written| written.answers),
    }
}

/// Silences of a guest around a switchover, beyond the period of its beats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Silences {
    /// The longest one before it: the effect of throttling.
    pub before: Duration,
    /// Between the last beat at one host and the first at the other.
    pub switchover: Duration,
}

/// Finds the silence of the switchover, and the longest one between `from` and it. It goes by the
/// sockets on which beats arrive, not by the time that the mover reports.
pub(super) fn silences(beats: &[Beat], from: Instant, period: Duration) -> Silences {
    let silence = |pair: &[Beat]| (pair[1].at - pair[0].at).saturating_sub(period);
    let moves = |pair: &&[Beat]| pair[0].socket != pair[1].socket;
    let stays = beats.windows(2).take_while(|pair| !moves(pair));
    let before = stays.filter(|pair| pair[1].at > from).map(silence).max();
    let switchover = beats.windows(2).find(moves).map(silence);
    Silences { before: before.unwrap_or_default(), switchover: switchover.unwrap_or_default() }
}

/// Pages of memory written, according to the beats with counts between two instants and the last
/// one before them.
pub(super) fn pages(beats: &[Beat], from: Instant, to: Instant) -> Vec<(Instant, u64)> {
    counts(beats, from, to, |written| written.pages)
}

/// The same for pages of files.
pub(super) fn touched(beats: &[Beat], from: Instant, to: Instant) -> Vec<(Instant, u64)> {
    counts(beats, from, to, |written| written.touched)
}

fn counts(
    beats: &[Beat],
    from: Instant,
    to: Instant,
    of: impl Fn(Written) -> u64,
) -> Vec<(Instant, u64)> {
    let counts = beats.iter().filter_map(|beat| Some((beat.at, of(beat.written?))));
    let mut counts: Vec<_> = counts.take_while(|(at, _)| *at <= to).collect();
    let first = counts.partition_point(|(at, _)| *at <= from);
    counts.drain(..first.saturating_sub(1));
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_millis(5);

    #[test]
    fn a_blackout_is_felt_and_costs_work() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut beats = Vec::new();
        for tick in 0..200 {
            // Stopped for 300 ms from 500 ms on, and late again after the window.
            let ms = tick * 5 + if tick >= 100 { 300 } else { 0 };
            let counts =
                Written { pages: tick * 2, disk_pages: tick, answers: tick * 4, touched: 0 };
            let written = (tick % 10 == 0).then_some(counts);
            beats.push(Beat { at: at(ms), socket: 0, written });
        }
        beats.push(Beat { at: at(9000), socket: 0, written: None });
        let all = felt(&beats, at(0), at(1200), PERIOD);
        assert_eq!(all.gap, Duration::from_millis(300));
        assert!((all.pages_per_s - 300.0).abs() < 10.0, "{all:?}");
        assert!((all.disk_pages_per_s - 150.0).abs() < 5.0, "{all:?}");
        assert!((all.answers_per_s - 600.0).abs() < 20.0, "{all:?}");
        let before = felt(&beats, at(0), at(400), PERIOD);
        assert_eq!(before.gap, Duration::ZERO);
        assert!((before.pages_per_s - 400.0).abs() < 1.0, "{before:?}");
        assert_eq!(felt(&[], at(0), at(1), PERIOD).pages_per_s, 0.0);
    }

    #[test]
    fn the_silence_of_the_switchover_is_told_from_those_before() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let beat = |(ms, socket)| Beat { at: at(ms), socket, written: None };
        // A silence before the migration, two stalls, the downtime, and a silence after it.
        let here = [0, 500, 505, 525, 530, 565, 570].map(|ms| beat((ms, 0)));
        let there = [790, 795, 1800].map(|ms| beat((ms, 1)));
        let found = silences(&[&here[..], &there[..]].concat(), at(502), PERIOD);
        assert_eq!(found.before, Duration::from_millis(30));
        assert_eq!(found.switchover, Duration::from_millis(215));
        assert_eq!(silences(&here, at(900), PERIOD), Silences::default());
    }

    #[test]
    fn counts_are_those_of_a_window_and_the_one_before() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let beat = |ms: u64| {
            let written =
                ms.is_multiple_of(50).then_some(Written { pages: ms, ..Written::default() });
            Beat { at: at(ms), socket: 0, written }
        };
        let beats: Vec<_> = (0..40).map(|nth| beat(nth * 5)).collect();
        let counts: Vec<_> = pages(&beats, at(60), at(155)).iter().map(|it| it.1).collect();
        assert_eq!(counts, [50, 100, 150]);
    }
}
