use super::super::cores::Machines;
use super::super::pace::example;
use super::super::placement::Placement;
use super::super::trace::Mix;
use super::super::vm::PASSES_MAX;
use super::*;

const MIB: u64 = 1 << 20;

fn mix() -> Mix {
    Mix {
        vms: 8,
        systems: 1,
        system_bytes: 32 * MIB,
        common_bytes: 32 * MIB,
        repeated_bytes: 4 * MIB,
        own_bytes: 16 * MIB,
        dirty_bytes_per_s: 0,
        working_set_bytes: 0,
    }
}

fn near(figure: f64, expected: f64) -> bool {
    (figure - expected).abs() <= expected * 0.03
}

fn runs(trace: &Trace, residents: usize) -> [Outcome; 3] {
    let run = |share| {
        run(share, &Ground::like_lab(), &example(Machines::Unlimited), trace, residents).unwrap()
    };
    [Share::Off, Share::Host, Share::Rack].map(run)
}

#[test]
fn pages_cross_the_core_as_often_as_sharing_allows() {
    let [off, host, rack] = runs(&mix().trace(), 0);
    let mib = |bytes: f64| bytes / MIB as f64;
    assert!(near(mib(off.body_bytes), 8.0 * 84.0), "{off:?}");
    // Once per host: the system, the common content and the repeated page. Also each VM's own.
    assert!(near(mib(host.body_bytes), 2.0 * 64.0 + 8.0 * 16.0), "{host:?}");
    assert!(near(mib(rack.body_bytes), 64.0 + 8.0 * 16.0), "{rack:?}");
    assert!(near(mib(rack.peer_bytes), 64.0), "{rack:?}");
    for one in [&off, &host, &rack] {
        assert!(near(one.body_bytes + one.named_bytes, off.body_bytes), "{one:?}");
        assert!(one.core_bytes > one.body_bytes && one.core_bytes < one.body_bytes * 1.1);
    }
    assert_eq!(rack.rack_duplicate_bytes, [0]);
    assert!(off.rack_duplicate_bytes[0] > host.rack_duplicate_bytes[0]);
    assert!(near(mib(host.rack_duplicate_bytes[0] as f64), 64.0), "{host:?}");
    // Two edges of the target rack are the limit.
    let edge = 250e6 / 8.0 / 1.046;
    let expected_s = off.body_bytes / (2.0 * edge) + 0.6;
    assert!(near(off.total_s.unwrap(), expected_s), "{off:?}, not {expected_s}");
    // They limit sharing in the rack, too: what one target gets from the other crosses their edges
    // as well.
    let [off_s, host_s, rack_s] = [off, host, rack].map(|one| one.total_s.unwrap());
    assert!(host_s < off_s / 1.5 && rack_s < host_s * 1.1, "{off_s} {host_s} {rack_s}");
}

#[test]
fn content_in_the_rack_is_not_sent() {
    let trace = mix().trace().repeated(9);
    let [_, _, rack] = runs(&trace, 1);
    // The resident equals the first VM, which therefore has nothing of its own.
    assert!(near(rack.body_bytes / MIB as f64, 7.0 * 16.0), "{rack:?}");
    assert_eq!(rack.rack_duplicate_bytes, [0]);
}

/// Where VMs of three systems go to two racks or four hosts, each of which would get them all.
#[test]
fn placed_by_content_each_system_crosses_the_core_once() {
    let ground = Ground { target_racks: 2, ..Ground::like_lab() };
    let mix = Mix { vms: 12, systems: 3, system_bytes: 64 * MIB, common_bytes: 0, ..mix() };
    let trace = Mix { repeated_bytes: 0, ..mix }.trace();
    let outcome = |share, placement| {
        let pace = Pace { placement, ..example(Machines::Unlimited) };
        run(share, &ground, &pace, &trace, 0).unwrap()
    };
    let own = 12.0 * 16.0;
    for (share, copies) in [(Share::Rack, 2.0), (Share::Host, 4.0)] {
        let systems = |placement| outcome(share, placement).body_bytes / MIB as f64 - own;
        let [memory, content] = [Placement::Memory, Placement::Content].map(systems);
        assert!(near(memory, copies * 3.0 * 64.0), "{share}: {memory}");
        assert!(near(content, 3.0 * 64.0), "{share}: {content}");
    }
    let [off, host] = [Share::Off, Share::Host].map(|share| outcome(share, Placement::Content));
    assert!(host.core_bytes < off.core_bytes * 0.5, "{host:?}, {off:?}");
    // Where nothing is shared, content decides nothing.
    assert_eq!(off, outcome(Share::Off, Placement::Memory));
    // One that is at a target already is where VMs of its system go, and brings none.
    let trace = trace.repeated(13);
    let pace = Pace { placement: Placement::Content, ..example(Machines::Unlimited) };
    let rest = run(Share::Rack, &ground, &pace, &trace, 1).unwrap().body_bytes / MIB as f64;
    assert!(near(rest, 2.0 * 64.0 + 11.0 * 16.0), "{rest}");
}

#[test]
fn a_writing_vm_takes_passes_until_it_fits_or_is_stopped() {
    let mix = Mix { vms: 1, dirty_bytes_per_s: 10_000_000, working_set_bytes: 64 * MIB, ..mix() };
    let trace = mix.trace();
    let busy =
        run(Share::Off, &Ground::like_lab(), &example(Machines::Unlimited), &trace, 0).unwrap();
    assert!(busy.core_bytes > busy.body_bytes * 1.2, "{busy:?}");
    let faster = Mix { dirty_bytes_per_s: 1_000_000_000, ..mix };
    let never =
        run(Share::Off, &Ground::like_lab(), &example(Machines::Unlimited), &faster.trace(), 0)
            .unwrap();
    let passes = (never.core_bytes / 1.046 - never.body_bytes) / (64 * MIB) as f64;
    assert!(near(passes, f64::from(PASSES_MAX)), "{passes} passes");
}

#[test]
fn few_cores_limit_a_gang() {
    let trace = mix().trace();
    let with = |machines| {
        let pace = Pace { machines, ..example(Machines::Unlimited) };
        let outcome = run(Share::Rack, &Ground::like_lab(), &pace, &trace, 0).unwrap();
        (outcome.total_s.unwrap(), outcome)
    };
    let (unlimited_s, unlimited) = with(Machines::Unlimited);
    assert!(near(with(Machines::Each(16.0)).0, unlimited_s));
    let (total_s, few) = with(Machines::One(1.5));
    assert!(total_s > unlimited_s * 1.2, "{total_s}, {unlimited_s}");
    // Nearly all of the cores' time was used, and not more.
    let used = few.cpu_s / (1.5 * total_s);
    assert!((0.9..1.01).contains(&used) && few.cpu_s > unlimited.cpu_s, "{used}, {few:?}");
    assert!(near(few.body_bytes, unlimited.body_bytes), "{few:?}");
}

#[test]
fn at_most_as_many_vms_move_at_a_time_as_allowed() {
    let one_by_one = Pace { parallel: 1, ..example(Machines::Unlimited) };
    let ground = Ground { source_racks: 1, source_hosts: 1, target_hosts: 1, ..Ground::like_lab() };
    let trace = Mix { vms: 3, ..mix() }.trace();
    let alone = run(Share::Off, &ground, &one_by_one, &trace, 0).unwrap();
    // The next VM is prepared while one lands.
    let edge = 250e6 / 8.0 / 1.046;
    let sending_s = alone.body_bytes / edge;
    let total_s = alone.total_s.unwrap();
    assert!(total_s > sending_s + 0.6 && total_s < sending_s + 3.0 * 0.6, "{total_s}");
}
