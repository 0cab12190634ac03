//! What a gang's moves can use of the bandwidth that they share.

use std::collections::BTreeMap;

use api::{BitRate, GangOptions, GangRequest, Phase, PlannedMove, Progress};
use policy::gang::{Limits, Link, Move, Need, Stage, admit, is_landing};

use super::cluster::Cluster;

/// The weight of the newest rate in their mean: rates are of the last 50 ms, twice a second.
const NEWEST: f64 = 0.3;

/// The links that moves with these ends share: what all may use together, and for each rack's
/// uplink what leaves the rack, and what enters it.
pub(super) fn links<'m>(
    options: &GangOptions,
    ends: impl Iterator<Item = (&'m str, &'m str)>,
    cluster: &dyn Cluster,
) -> Vec<Link> {
    let (racks, uplinks) = (cluster.racks(), cluster.uplinks());
    let rack = |host: &str| racks.get(host).and_then(Option::as_deref);
    let mut links = Vec::new();
    let mut all = Vec::new();
    let mut crossing: BTreeMap<(&str, bool), Vec<usize>> = BTreeMap::new();
    for (number, (from, to)) in ends.enumerate() {
        all.push(number);
        let (from, to) = (rack(from), rack(to));
        if from != to {
            for end in [from.map(|rack| (rack, true)), to.map(|rack| (rack, false))] {
                end.into_iter().for_each(|end| crossing.entry(end).or_default().push(number));
            }
        }
    }
    if let Some(total) = options.limit_total_bits_per_s {
        links.push(Link { bits_per_s: total.bits_per_s(), moves: all });
    }
    for ((rack, _), moves) in crossing {
        if let Some(uplink) = uplinks.get(rack) {
            links.push(Link { bits_per_s: uplink.bits_per_s(), moves });
        }
    }
    links
}

/// What a move can use that has not started.
pub(super) fn fresh(options: &GangOptions, used_bytes: u64) -> Need {
    let most_bits_per_s = options.bounds.limit_bits_per_s.map(BitRate::bits_per_s);
    Need { most_bits_per_s, left_bytes: used_bytes, ..Need::default() }
}

/// What a move with this limit can use, by its last progress, which comes from a peer.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
pub(super) fn followed(before: Need, limit: Option<u64>, progress: &Progress) -> Need {
    let sent = (progress.phase > Phase::Prepare).then(|| {
        let now = progress.wire_bytes_per_s * 8.0;
        // It is assumed to use its limit until it shows otherwise.
        let before = before.sent_bits_per_s.or(limit).map_or(now, |before| before as f64);
        (before + (now - before) * NEWEST) as u64
    });
    Need {
        sent_bits_per_s: sent,
        left_bytes: progress.left_bytes,
        // Its downtime is planned with the rate that it has.
        is_fixed: is_landing(progress.phase >= Phase::Stopped, progress.time_left_s),
        ..before
    }
}

/// Adds to the plan of a dry run with which limits the first moves start.
pub(super) fn at_first(request: &GangRequest, moves: &mut [PlannedMove], cluster: &dyn Cluster) {
    let options = &request.options;
    let ends = moves.iter().map(|one| (one.from.as_str(), one.to.as_str()));
    let mut limits = Limits::new(links(options, ends, cluster));
    let waiting = moves.iter().map(|one| Move {
        vm: &one.vm,
        from: &one.from,
        to: &one.to,
        bytes: one.used_bytes,
        stage: Stage::Waiting,
    });
    let first = admit(&waiting.collect::<Vec<_>>(), request.parallel.into());
    let first = first.into_iter().filter(|number| limits.apply_to(*number));
    let needs = first.map(|number| (number, fresh(options, moves[number].used_bytes))).collect();
    for (number, limit) in limits.next(&needs, 0.0) {
        moves[number].limit_bits_per_s = BitRate::from_bits(limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(total: Option<&str>) -> GangOptions {
        let limit_total_bits_per_s = total.map(|total| total.parse().unwrap());
        GangOptions { limit_total_bits_per_s, ..GangOptions::default() }
    }

    #[test]
    fn what_a_move_sends_is_known_when_it_has_sent_for_a_while() {
        let limit = Some(8_000);
        let at = |phase, wire_bytes_per_s| {
            let started = Progress::new(("0a0b0c0d", "web1"), ("x", "y"), 1);
            Progress { phase, wire_bytes_per_s, left_bytes: 7, ..started }
        };
        let before = fresh(&options(Some("1M")), 9);
        let prepared = followed(before, limit, &at(Phase::Prepare, 0.0));
        assert_eq!((prepared.sent_bits_per_s, prepared.left_bytes), (None, 7));
        let mut need = followed(prepared, limit, &at(Phase::FirstPass, 100.0));
        assert!(need.sent_bits_per_s.is_some_and(|sent| sent.abs_diff(5_840) < 10));
        for _ in 0..30 {
            need = followed(need, limit, &at(Phase::LaterPass, 100.0));
        }
        assert!(need.sent_bits_per_s.is_some_and(|sent| sent.abs_diff(800) < 10) && !need.is_fixed);
        let lands = Progress { time_left_s: Some(1.0), ..at(Phase::LaterPass, 100.0) };
        assert!(followed(need, limit, &lands).is_fixed);
        assert!(followed(need, limit, &at(Phase::Stopped, f64::NAN)).is_fixed);
    }
}
