//! What a gang's moves can use of the bandwidth that they share.

use api::{BitRate, GangOptions, GangRequest, Phase, PlannedMove, Progress};
use policy::gang::{Limits, Link, Move, Need, Stage, admit};

/// The weight of the newest rate in their mean: rates are of the last 50 ms, twice a second.
const NEWEST: f64 = 0.3;

/// The links that these moves share.
pub(super) fn links(options: &GangOptions, moves: usize) -> Vec<Link> {
    let total = options.limit_total_bits_per_s.map(BitRate::bits_per_s);
    total.map(|bits_per_s| Link { bits_per_s, moves: (0..moves).collect() }).into_iter().collect()
}

/// What a move can use that has not begun.
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
        is_fixed: progress.phase >= Phase::Stopped,
        ..before
    }
}

/// Adds to the plan of a dry run with which limits the first moves start.
pub(super) fn at_first(request: &GangRequest, moves: &mut [PlannedMove]) {
    let options = &request.options;
    let mut limits = Limits::new(links(options, moves.len()));
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
    fn a_dry_run_shows_the_limits_of_the_first_moves() {
        let one = |vm: &str| PlannedMove {
            vm: vm.to_owned(),
            from: "x".to_owned(),
            to: "y".to_owned(),
            ram_bytes: 1 << 30,
            used_bytes: 1 << 30,
            shared_bytes: None,
            shared: None,
            limit_bits_per_s: None,
        };
        let mut request: GangRequest =
            serde_json::from_str(r#"{"evacuate":{"host":"x"},"parallel":2}"#).unwrap();
        for (total, expected) in [(Some("10G"), Some("5G")), (None, None)] {
            request.options = options(total);
            let mut moves = ["a", "b", "c"].map(one);
            at_first(&request, &mut moves);
            let limit: Option<BitRate> = expected.map(|limit| limit.parse().unwrap());
            assert_eq!(moves.map(|one| one.limit_bits_per_s), [limit, limit, None]);
        }
    }

    #[test]
    fn what_a_move_sends_is_known_when_it_has_sent_for_a_while() {
        let limit = Some(8_000);
        let at = |phase, wire_bytes_per_s| {
            let begun = Progress::new(("0a0b0c0d", "web1"), ("x", "y"), 1);
            Progress { phase, wire_bytes_per_s, left_bytes: 7, ..begun }
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
        assert!(followed(need, limit, &at(Phase::Stopped, f64::NAN)).is_fixed);
    }
}
