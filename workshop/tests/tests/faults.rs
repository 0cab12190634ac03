//! Faults in the middle of a migration, after which exactly one VM runs: a fixed set of those that
//! `make faults` tries at random. Some of them with pages from disks.

use std::time::Duration;

use end_to_end::faults::{End, Fault, Moment, Plan, Way, Yard};
use lab::guest::System;

/// Long enough for a side that is cut off to give up.
const LONG: Duration = Duration::from_secs(13);

fn assert_survived(system: System, faults: &[(Fault, u64, Duration)]) {
    let plans: Vec<Plan> = faults
        .iter()
        .map(|&(fault, delay_ms, lasts)| Plan::at_a_step(fault, delay_ms, lasts))
        .collect();
    assert_all_survived(system, &plans);
}

fn assert_all_survived(system: System, plans: &[Plan]) {
    let mut yard = Yard::new(system);
    for (nth, plan) in plans.iter().enumerate() {
        // That the VM can move again is shown by the next plan, whose fault waits for its move.
        let plan = Plan { once_more: nth + 1 == plans.len(), ..*plan };
        let seen = yard.try_one(&plan);
        println!("{seen}, {}: {:?}", seen.phase, seen.fate);
        assert!(seen.fate.is_ok(), "{plan:?}: {}", seen.fate.unwrap_err());
    }
}

const SHORT: Duration = Duration::from_millis(500);

#[test]
fn agents_die_at_each_step_of_a_switchover() {
    use End::{Destination, Source};
    assert_survived(
        System::Bare,
        &[
            (Fault::KillAgent(Source), 100, SHORT),
            (Fault::KillAgent(Destination), 100, SHORT),
            (Fault::KillAgent(Source), 350, SHORT),
            (Fault::KillAgent(Destination), 350, SHORT),
            (Fault::KillAgent(Destination), 550, SHORT),
            (Fault::KillBothAgents, 300, SHORT),
            (Fault::KillBothAgents, 500, SHORT),
        ],
    );
}

#[test]
fn the_network_ends_in_the_middle_of_a_switchover() {
    assert_survived(
        System::Bare,
        &[
            (Fault::Cut, 300, LONG),
            (Fault::CutOneWay(End::Source), 100, SHORT),
            (Fault::CutOneWay(End::Destination), 300, LONG),
            (Fault::Reset, 400, SHORT),
            (Fault::Late, 0, SHORT),
            (Fault::HeldUp(End::Source), 350, SHORT),
            (Fault::HeldUp(End::Destination), 100, SHORT),
        ],
    );
}

#[test]
fn qemus_and_disks_fail_in_the_middle_of_a_switchover() {
    use End::{Destination, Source};
    assert_survived(
        System::Bare,
        &[
            (Fault::KillQemu(Source), 50, SHORT),
            (Fault::FreezeQemu(Destination), 250, SHORT),
            (Fault::FreezeAgent(Source), 250, SHORT),
            (Fault::DiskFull(Destination), 0, SHORT),
            (Fault::DiskFull(Source), 0, SHORT),
            (Fault::KillQemu(Destination), 520, SHORT),
        ],
    );
}

/// The VM gets another QEMU on its host, whose agent is at both ends.
#[test]
fn upgrades_fail_in_the_middle_of_a_switchover() {
    use End::{Destination, Source};
    for in_files in [true, false] {
        let plans = [
            (Fault::KillAgent(Source), 100),
            (Fault::KillAgent(Source), 300),
            (Fault::KillAgent(Source), 500),
            (Fault::KillQemu(Destination), 100),
            (Fault::FreezeQemu(Destination), 250),
            (Fault::FreezeAgent(Source), 250),
            (Fault::DiskFull(Source), 0),
            (Fault::KillQemu(Source), 50),
        ];
        let way = Way::Upgrade { in_files };
        let plans = plans.map(|(fault, ms)| Plan { way, ..Plan::at_a_step(fault, ms, SHORT) });
        assert_all_survived(System::Bare, &plans);
    }
}

/// One without memory while pages arrive, and one whose QEMU dies with the VM's disks; a plan in
/// between is without certificates.
#[test]
fn destinations_fail_that_read_from_disks() {
    let full = Plan::at_a_step(Fault::MemoryFull(End::Destination), 300, SHORT);
    let at = |moment| Plan { moment, ..full };
    let plain = Plan { secured: false, ..at(Moment::Preparing) };
    let killed = Plan::at_a_step(Fault::KillQemu(End::Destination), 300, SHORT);
    assert_all_survived(System::Linux, &[at(Moment::FirstPass), plain, killed]);
}
