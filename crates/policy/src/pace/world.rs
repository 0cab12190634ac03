//! The pacing policy in a simulated network.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates made up here are positive and small"
)]

mod network;

use proptest::prelude::*;

use super::*;
use network::*;

#[test]
fn alone_no_lane_is_paced() {
    for wire in [Wire::known(|_| 0.0), Wire::unknown(|_| 0.0)] {
        for second in World::one(wire).seconds(20) {
            assert_eq!(second.paces, [None]);
        }
    }
}

#[test]
fn a_neighbour_loses_little_and_most_of_what_it_leaves_is_used() {
    for known in [true, false] {
        for share in [0.1, 0.3, 0.5, 0.7, 0.85] {
            for (seed, noise) in (1..9).flat_map(|seed| [(seed, 0.0), (seed, 0.02), (seed, 0.05)]) {
                let want = noisy(share, noise, seed);
                let wire = if known { Wire::known(want) } else { Wire::unknown(want) };
                let mut world = World::one(wire).look();
                let begun = world.seconds(3);
                let seconds = world.seconds(60);
                let (used, lost_then, lost_at_first) =
                    (used_of_spare(&seconds), lost(&seconds), lost(&begun));
                let case = format!(
                    "known {known}, {share} +-{noise}: uses {used:.3}, loses {lost_then:.3} ({lost_at_first:.3} at first)"
                );
                println!("{case}");
                assert!(used >= 0.85, "{case}");
                assert!(lost_then <= 0.03, "{case}");
            }
        }
    }
}

#[test]
fn a_steady_neighbour_sees_no_swings() {
    for share in [0.1, 0.5, 0.85] {
        let mut world = World::one(Wire::known(move |_| CAN * share));
        // Between two trials of whether the wire carries more.
        world.seconds(160);
        let seconds = world.seconds(50);
        let paces: Vec<_> = seconds.iter().map(|second| second.paces[0].unwrap()).collect();
        let (least, most) = (paces.iter().min().unwrap(), paces.iter().max().unwrap());
        assert!(*most as f64 <= *least as f64 * 1.01, "{least} to {most}");
    }
}

#[test]
fn a_new_neighbour_gets_room_within_two_samples_and_leaves_it_at_once() {
    for share in [0.3, 0.6, 0.9] {
        for offset in 0..TICKS {
            let (from, to) = (20 * TICKS + offset, 40 * TICKS + offset);
            let want = move |tick| if (from..to).contains(&tick) { CAN * share } else { 0.0 };
            let mut world = World::one(Wire::known(want));
            let seconds = world.seconds(50);
            let loses = |second: &Second| second.wanted - second.got;
            // The neighbour starts in second 20. The first sample that it fills completely is the
            // first that shows all of it.
            for (nth, second) in seconds.iter().enumerate().take(40).skip(23) {
                assert!(loses(second) <= CAN * 0.02, "{share} {offset} {nth} {second:?}");
            }
            let settled = used_of_spare(&seconds[25..40]);
            assert!(settled >= 0.86, "{share} {offset}: {settled}");
            let after = seconds[42].ours();
            assert!(after >= CAN * 0.87, "{share} {offset}: {after}");
            assert_eq!(seconds[47].paces, [None]);
        }
    }
}

#[test]
fn a_neighbour_that_wants_everything_gets_all_but_the_reserve() {
    let reserve = 10_000_000;
    let mut world = World::one(Wire::known(|_| 10.0 * CAN));
    world.bounds.reserve_bytes_per_s = reserve;
    let seconds = world.seconds(30);
    for second in &seconds[6..] {
        assert!(second.paces[0].unwrap() <= reserve * 11 / 10, "{second:?}");
        assert!(second.paces[0].unwrap() >= reserve, "{second:?}");
    }
}

#[test]
fn others_yield_what_the_vm_needs_down_to_what_they_keep() {
    for at_source in [true, false] {
        // Shares of the wire, of which the neighbour wants 0.8.
        for (needed, keep, ours) in [
            (0.4, 0.0, 0.4),
            (0.4, 0.5, 0.4),
            (0.9, 0.6, 0.4),
            (0.4, 0.75, 0.25),
            // Others leave as much, or a little less while it is tried whether the wire carries more.
            (0.1, 0.0, 0.185),
        ] {
            let case = format!("{at_source}: {needed} next to {keep}");
            let mut world = World::one(Wire::known(|_| 0.0));
            let ends = if at_source { &mut world.here } else { &mut world.there };
            *ends = vec![Wire::known(|_| CAN * 0.8)];
            world.bounds.others_keep_bytes_per_s = Some((CAN * keep) as u64);
            world = world.look();
            world.needed = CAN * needed;
            world.seconds(5);
            for second in world.seconds(20) {
                assert!((second.ours() / CAN - ours).abs() < 0.05, "{case}: {second:?}");
                assert!(second.got >= CAN * keep * 0.98, "{case}: {second:?}");
            }
            let Yielded { spare_bytes_per_s, wider } = world.pace.yielded();
            assert_eq!(spare_bytes_per_s.is_some(), needed > 0.2, "{case}");
            assert_eq!(wider, keep < 0.55, "{case}");
        }
    }
}

#[test]
fn others_yield_nothing_unless_the_operator_bounds_what_they_keep() {
    let mut worlds = [0.0, 10.0 * CAN].map(|needed| {
        let mut world = World::one(Wire::known(noisy(0.6, 0.05, 3)));
        world.needed = needed;
        world
    });
    for _ in 0..40 {
        let [without, with] = worlds.each_mut().map(|world| world.second().paces);
        assert_eq!(without, with);
    }
    assert_eq!(worlds[1].pace.yielded(), Yielded::default());
}

#[test]
fn what_the_vm_no_longer_needs_is_given_back() {
    let mut world = World::one(Wire::known(|_| CAN * 0.8)).look();
    world.bounds.others_keep_bytes_per_s = Some(0);
    world.needed = CAN * 0.45;
    let seconds = world.seconds(20);
    assert!(lost(&seconds[5..]) > 0.2);
    world.needed = 0.0;
    world.seconds(5);
    let lost = lost(&world.seconds(20));
    assert!(lost < 0.02, "{lost}");
}

#[test]
fn the_cap_wins_over_what_the_vm_needs() {
    let mut world = World::one(Wire::known(|_| CAN * 0.8)).look();
    let cap = Some(30_000_000);
    (world.bounds.cap_bytes_per_s, world.bounds.others_keep_bytes_per_s) = (cap, Some(0));
    world.needed = f64::INFINITY;
    world.seconds(5);
    for second in world.seconds(10) {
        assert!(second.ours() <= 30e6 && second.ours() >= 29e6, "{second:?}");
    }
    assert!(!world.pace.yielded().wider);
}

#[test]
fn a_neighbour_yields_only_what_another_nic_can_not_carry() {
    let mut world = World::new(vec![Wire::known(|_| CAN * 0.8), Wire::known(|_| 0.0)]).look();
    world.bounds.others_keep_bytes_per_s = Some(0);
    for (needed, ours) in [(0.9, 0.185), (1.3, 0.3)] {
        world.needed = CAN * needed;
        world.seconds(5);
        for second in world.seconds(10) {
            assert!((second.lanes[0] / CAN - ours).abs() < 0.05, "{needed}: {second:?}");
            assert!(second.lanes[1] >= CAN * 0.99, "{needed}: {second:?}");
        }
    }
}

/// Flows that back off and grow again fill a wire unevenly.
#[test]
fn an_unevenly_filled_wire_is_left_to_its_neighbours() {
    for seed in 1..9 {
        let mut random = Random(seed);
        let mut world = World::one(Wire::known(|_| 10.0 * CAN));
        let mut seconds = Vec::new();
        for _ in 0..60 {
            world.here[0].can = CAN * (1.0 - 0.005 * random.next().abs());
            seconds.push(world.second());
        }
        let got: f64 = seconds[10..].iter().map(|second| second.got).sum();
        assert!(got >= 50.0 * CAN * 0.9, "{}", got / 50.0 / CAN);
    }
}

#[test]
fn only_the_lane_beside_a_neighbour_is_slowed() {
    let mut world = World::new(vec![Wire::known(|_| CAN * 0.8), Wire::known(|_| 0.0)]);
    let second = world.seconds(10).pop().unwrap();
    assert!(second.paces[0].unwrap() as f64 * WIRE_PER_CONTENT <= CAN * 0.2);
    assert_eq!(second.paces[1], None);
}

#[test]
fn lanes_on_one_nic_share_what_it_has() {
    let mut world = World::one(Wire::known(|_| CAN * 0.4));
    world.lanes = vec![(0, 0); 3];
    world.dead = vec![false; 3];
    let seconds = world.seconds(20);
    let last = &seconds[19].paces;
    assert!(last.iter().all(|pace| *pace == last[0]), "{last:?}");
    assert!(used_of_spare(&seconds[10..]) >= 0.85);
    // One lane dies: the others get its part.
    world.dead[1] = true;
    let seconds = world.seconds(20);
    assert!(used_of_spare(&seconds[5..]) >= 0.85, "{}", used_of_spare(&seconds[5..]));
}

#[test]
fn a_neighbour_of_the_destination_counts_as_well() {
    let mut world = World::one(Wire::known(|_| 0.0));
    world.there = vec![Wire::known(|_| CAN * 0.6)];
    world.seconds(5);
    let seconds = world.seconds(20);
    assert!(lost(&seconds) < 0.01, "{}", lost(&seconds));
    let used = seconds.iter().map(Second::ours).sum::<f64>() / (20.0 * CAN * 0.4);
    assert!(used >= 0.85, "{used}");
}

#[test]
fn a_cap_is_used_by_the_lanes_that_can() {
    let mut world = World::new(vec![Wire::known(|_| CAN * 0.95), Wire::known(|_| 0.0)]);
    world.bounds.cap_bytes_per_s = Some(50_000_000);
    world.seconds(10);
    let seconds = world.seconds(10);
    for second in &seconds {
        assert!(second.ours() <= 50e6 && second.ours() >= 47e6, "{second:?}");
    }
    world.dead = vec![true, false];
    let second = world.seconds(10).pop().unwrap();
    assert!(second.ours() >= 46e6, "{second:?}");
}

#[test]
fn two_migrations_on_a_nic_divide_its_spare() {
    let mut paces = [Pace::default(), Pace::default()];
    let mut rates = [0.0_f64; 2];
    let theirs = CAN * 0.5;
    for second in 0..30 {
        let ours = rates.iter().sum::<f64>() * WIRE_PER_CONTENT;
        let nics = [NicUse {
            speed_bytes_per_s: Some(LINK as u64),
            all_bytes_per_s: (ours + theirs) as u64,
            content_bytes_per_s: ((ours + theirs) / WIRE_PER_CONTENT) as u64,
            ours_bytes_per_s: rates.iter().sum::<f64>() as u64,
            migrations: 2,
        }];
        // The second migration has a cap for a while, and leaves the rest to the first.
        let cap = (10..20).contains(&second).then_some(5_000_000);
        for (nth, pace) in paces.iter_mut().enumerate() {
            let bytes_per_s = rates[nth] as u64;
            let lanes = [LaneUse { nic: Some(0), bytes_per_s, writing: 1.0 }];
            let bounds =
                PaceBounds { cap_bytes_per_s: cap.filter(|_| nth == 1), ..PaceBounds::default() };
            let sample = PaceSample { nics: &nics, lanes: &lanes, destination: None };
            rates[nth] = pace.next(&sample, bounds)[0].unwrap() as f64;
        }
        let spare = (CAN - theirs) / WIRE_PER_CONTENT;
        let sum = rates.iter().sum::<f64>();
        match second {
            5..10 | 25..30 => {
                assert!((rates[0] / rates[1] - 1.0).abs() < 0.05, "{second}: {rates:?}");
                assert!(sum <= spare && sum >= spare * 0.85, "{second}: {rates:?}");
            }
            15..20 => assert!(sum <= spare && sum >= spare * 0.85, "{second}: {rates:?}"),
            _ => {}
        }
    }
}

/// Another migration uses the same NIC, to another destination, until a second before it ends; the
/// NICs' speeds are not known.
#[test]
fn a_migration_gets_the_whole_nic_when_another_ends() {
    let mut random = Random(7);
    let mut pace = Pace::default();
    let mut paced = None;
    for second in 0..30 {
        // TCP gives it little while the other migration runs.
        let left = if second < 6 { 2e6 } else { CAN / WIRE_PER_CONTENT };
        let mine = paced.map_or(left, |paced| left.min(paced as f64));
        let fellow = if second < 6 { CAN - mine * WIRE_PER_CONTENT } else { 0.0 };
        let nic = |all: f64, ours: f64, migrations| NicUse {
            speed_bytes_per_s: None,
            all_bytes_per_s: all as u64,
            content_bytes_per_s: (all / WIRE_PER_CONTENT) as u64,
            ours_bytes_per_s: ours as u64,
            migrations,
        };
        let wire = mine * WIRE_PER_CONTENT;
        let nics = [nic(wire + fellow, mine + fellow / WIRE_PER_CONTENT, 2)];
        // The content of its sockets is read later.
        let read = mine * (1.0 - 0.2 * random.next().abs());
        let destination = DestinationUse { nics: vec![nic(wire, read, 1)], lanes: vec![Some(0)] };
        let lanes = [LaneUse { nic: Some(0), bytes_per_s: mine as u64, writing: 1.0 }];
        let sample = PaceSample { nics: &nics, lanes: &lanes, destination: Some(&destination) };
        paced = pace.next(&sample, PaceBounds::default())[0];
        assert!(second < 8 || mine >= left * 0.7, "{second}: {mine} of {left}");
    }
}

/// What was taken for the NIC's capacity is not: that shows within seconds.
#[test]
fn a_nic_that_carries_ten_times_what_it_showed_is_used_soon() {
    let others = |_| CAN * 0.05;
    let mut world = World::one(Wire { can: CAN * 0.1, ..Wire::unknown(others) });
    world.seconds(10);
    world.here[0].can = CAN;
    world.seconds(30);
    let used = used_of_spare(&world.seconds(10));
    assert!(used >= 0.8, "{used}");
}

/// Nothing is learned of a NIC that none of it crosses, nor while the path is broken.
#[test]
fn a_nic_that_shows_none_of_it_sets_no_pace() {
    for written in [100_000_000, 0] {
        let mut pace = Pace::default();
        for second in 0..30 {
            let nics = [NicUse { ours_bytes_per_s: written, migrations: 1, ..NicUse::default() }];
            let lanes = [LaneUse { nic: Some(0), bytes_per_s: written, writing: 1.0 }];
            let sample = PaceSample { nics: &nics, lanes: &lanes, destination: None };
            let paces = pace.next(&sample, PaceBounds::default());
            assert_eq!(paces, [None], "{written} in second {second}");
        }
    }
}

#[test]
fn the_operators_bounds_apply_at_once() {
    let capped = |cap| PaceBounds { cap_bytes_per_s: cap, ..PaceBounds::default() };
    let mut pace = Pace::start(2, capped(Some(10_000_000)));
    let sum = |paces: &[Option<u64>]| paces.iter().copied().sum::<Option<u64>>();
    let first = sum(pace.lanes()).unwrap();
    assert!((9_400_000..=9_600_000).contains(&first), "{first}");
    assert!(sum(pace.rebound(capped(Some(5_000_000)))).unwrap() <= first / 2 + 1);
    assert_eq!(pace.rebound(capped(None)), [None, None]);
}

#[test]
fn the_destinations_report_survives_json() {
    let said = DestinationUse {
        nics: vec![NicUse { speed_bytes_per_s: Some(1), ..NicUse::default() }],
        lanes: vec![Some(0), None],
    };
    let json = serde_json::to_string(&said).unwrap();
    assert_eq!(serde_json::from_str::<DestinationUse>(&json).unwrap(), said);
}

fn any_nic() -> impl Strategy<Value = NicUse> {
    let number = || prop_oneof![0..2_000_000_000_u64, any::<u64>()];
    (proptest::option::of(number()), number(), number(), number(), any::<u32>()).prop_map(
        |(
            speed_bytes_per_s,
            all_bytes_per_s,
            content_bytes_per_s,
            ours_bytes_per_s,
            migrations,
        )| {
            NicUse {
                speed_bytes_per_s,
                all_bytes_per_s,
                content_bytes_per_s,
                ours_bytes_per_s,
                migrations,
            }
        },
    )
}

proptest! {
    #[test]
    fn paces_stay_between_reserve_and_cap_for_any_report(
        seconds in proptest::collection::vec(
            (
                proptest::collection::vec(any_nic(), 0..4),
                proptest::collection::vec(any_nic(), 0..4),
                proptest::collection::vec(
                    (proptest::option::of(0..5_usize), any::<u64>(), -1.0..2.0_f64,
                     proptest::option::of(any::<u16>())),
                    1..5,
                ),
            ),
            1..20,
        ),
        reserve_bytes_per_s in 0..3_000_000_000_u64,
        cap_bytes_per_s in proptest::option::of(0..3_000_000_000_u64),
        others_keep_bytes_per_s in proptest::option::of(0..3_000_000_000_u64),
        needed in 0.0..3e9_f64,
    ) {
        let mut pace = Pace::default();
        pace.set_needed(needed);
        let bounds = PaceBounds { reserve_bytes_per_s, cap_bytes_per_s, others_keep_bytes_per_s };
        for (nics, far, lanes) in &seconds {
            let destination = DestinationUse {
                nics: far.clone(),
                lanes: lanes.iter().map(|(.., far)| far.map(|far| far % 5)).collect(),
            };
            let uses: Vec<_> = lanes
                .iter()
                .map(|(nic, bytes_per_s, writing, _)| LaneUse {
                    nic: *nic, bytes_per_s: *bytes_per_s, writing: *writing,
                })
                .collect();
            let sample = PaceSample { nics, lanes: &uses, destination: Some(&destination) };
            let paces = pace.next(&sample, bounds);
            prop_assert_eq!(paces.len(), lanes.len());
            // Some inputs allow lanes the largest possible rate.
            let sum: Option<u64> =
                paces.iter().copied().try_fold(0, |sum: u64, pace| Some(sum.saturating_add(pace?)));
            let lanes = lanes.len() as u64;
            if let Some(cap) = cap_bytes_per_s {
                let sum = sum.expect("all are paced under a cap");
                prop_assert!(sum <= cap.max(lanes), "{sum} under {cap}");
            }
            let least = reserve_bytes_per_s.max(RESERVE_LEAST)
                .min(cap_bytes_per_s.map_or(u64::MAX, |cap| (cap as f64 / WIRE_PER_CONTENT) as u64));
            prop_assert!(sum.is_none_or(|sum| sum.saturating_add(lanes) >= least), "{sum:?} above {least}");
            prop_assert!(paces.iter().all(|pace| *pace != Some(0)), "0 would be no pace");
        }
    }
}
