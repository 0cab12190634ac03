//! What others yield before a VM is throttled.

use super::*;

#[test]
fn a_vm_is_not_throttled_while_others_yield_what_it_needs() {
    for (name, sim) in kinds(&writer(2.0)) {
        for seed in 1..=8 {
            let alone = Sim { seed, ..sim.clone() }.run();
            assert!(alone.lowest() < 1.0 && alone.widest <= 1.0, "{name} {seed}");
            let sim = Sim { seed, yields: 8.0, ..sim.clone() };
            let outcome = sim.run();
            check(name, 2.0, &sim, &outcome);
            let (low, widest) = (outcome.lowest(), outcome.widest);
            assert!(low >= 1.0, "{name} {seed}: throttled to {low}, with up to {widest}");
            assert!(outcome.stopped_s.is_some() && outcome.step == Step::Go, "{name} {seed}");
            assert!(widest > 1.2 && widest < sim.yields, "{name} {seed}: {widest}");
        }
    }
}

#[test]
fn a_vm_that_others_do_not_yield_enough_for_is_throttled_less() {
    let (mut lost_s, mut alone_s) = (0.0, 0.0);
    for (name, sim) in kinds(&writer(4.0)) {
        alone_s += sim.run().lost_s;
        let outcome = Sim { yields: 2.0, ..sim.clone() }.run();
        check(name, 4.0, &sim, &outcome);
        assert!(outcome.stopped_s.is_some() && outcome.step == Step::Go, "{name}");
        assert!(outcome.lowest() < 1.0 && outcome.widest >= 2.0, "{name}");
        lost_s += outcome.lost_s;
    }
    assert!(lost_s < alone_s, "{lost_s} s lost, {alone_s} s without");
}

#[test]
fn nothing_is_taken_for_a_vm_that_need_not_be_throttled() {
    for times in [0.25, 0.5, 0.65] {
        for (name, sim) in kinds(&writer(times)) {
            let outcome = Sim { yields: 8.0, ..sim }.run();
            assert!(outcome.stopped_s.is_some() && outcome.widest <= 1.0, "{name} {times}");
        }
    }
}

#[test]
fn others_yield_to_a_vm_that_may_not_be_throttled() {
    let sim = with(&writer(2.0), |set| set.ratio = Ratio::Off);
    let until_s = 120.0;
    assert!(Sim { until_s, ..sim.clone() }.run().stopped_s.is_none());
    let outcome = Sim { until_s, yields: 8.0, ..sim }.run();
    assert!(outcome.stopped_s.is_some() && outcome.lowest() >= 1.0 && outcome.widest > 1.2);
}

/// Its first pass takes 90 s with what others leave.
#[test]
fn others_yield_to_a_vm_that_would_arrive_late() {
    let large = Sim { ram: 2048.0 * MIB, ..writer(0.5) };
    let sim = with(&large, |set| set.deadline = Some(Duration::from_secs(70)));
    let alone = sim.run();
    assert!(alone.late && alone.stopped_s.unwrap() > 70.0, "{:?}", alone.stopped_s);
    let outcome = Sim { yields: 8.0, ..sim }.run();
    assert!(outcome.stopped_s.unwrap() < 70.0, "{:?}", outcome.stopped_s);
    assert!(!outcome.late && outcome.lowest() >= 1.0);
    assert!(outcome.widest > 1.2 && outcome.widest < 4.0, "{}", outcome.widest);
}

#[test]
fn what_a_vm_needed_is_given_back() {
    let mut throttle = Throttle::default();
    let settings = Settings::default();
    let (first_pass_over, wider, counted_at_share) = (true, true, Some(1.0));
    let mut input = ThrottleInput { first_pass_over, wider, counted_at_share, ..FIRST };
    let mut needed = |dirty: f64, seconds: u32| {
        let mut last = None;
        for _ in 0..seconds * 20 {
            input.at += Duration::from_millis(50);
            input.pass += 1;
            // Each reading is a new one.
            input.dirty_bytes_per_s = Some(dirty + f64::from(input.pass % 2));
            last = throttle.next(&settings, &input).needed_bytes_per_s;
        }
        last
    };
    assert_eq!(needed(0.5 * LINK, 5), None);
    // Above its dirty rate, and the more it writes the more it needs.
    let much = needed(2.0 * LINK, 4).unwrap();
    assert!(much > 2.0 * LINK && much < 4.0 * LINK, "{much}");
    assert!(needed(4.0 * LINK, 2).unwrap() > much);
    // At first it may be a pause between bursts.
    assert!(needed(0.1 * LINK, 1).unwrap() > much);
    assert!(needed(0.1 * LINK, 10).unwrap() < 0.5 * LINK);
}
