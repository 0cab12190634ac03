//! QEMU's version differs between hosts, and changes.

use api::{Examination, Report};
use end_to_end::{Side, World, bare, guest, note};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use lab::setup::{self, Qemu};
use marks::runs;
use qemu::lost_writes::WHY;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const RATE: u64 = 2_000_000;
/// The first QEMU that its own machine type doesn't hold at the switchover.
const HOLDS_BY_DEVICES: (u32, u32) = (11, 1);
const NOT_HELD: &str = "stops the VM by itself";

fn release(qemu: &Qemu) -> (u32, u32) {
    (qemu.version.major, qemu.version.minor)
}

/// From the oldest to the newest.
fn qemus() -> Vec<Qemu> {
    setup::qemus(&setup::ensure().unwrap()).unwrap()
}

fn notes_a_hold_that_is_missing(report: &Report) -> bool {
    report.notes.iter().any(|note| note.contains(NOT_HELD))
}

/// Moves a VM along these QEMUs, between two hosts, with each kind of stream in turn.
fn along(mut spec: GuestSpec, machine: String, qemus: &[&Qemu]) {
    let world = World::new(Link::one(1000));
    spec.machine = machine;
    let guest = world.boot_with(&spec, &qemus[0].program);
    let sides = [Side::A, Side::B].into_iter().cycle();
    let taps = ["multifd", "classic", "classic", "multifd"].into_iter().cycle();
    for ((pair, side), tap) in qemus.windows(2).zip(sides).zip(taps) {
        let [from, to] = pair else { unreachable!("windows of two") };
        let set = format!("{}={}", from.program.display(), to.program.display());
        let mut args = vec!["--tap", tap];
        if from.program != to.program {
            args.extend(["--set", &set]);
        }
        let report = world.migrate(&guest, side, &args);
        assert_eq!(report.tap, tap);
        let versions = [from, to].map(|qemu| qemu.version.to_string());
        assert_eq!(report.qemu, versions);
        assert!(!notes_a_hold_that_is_missing(&report), "{:?}", report.notes);
    }
}

/// Each QEMU with its newest machine type.
#[test]
fn each_to_itself() {
    for qemu in &qemus() {
        along(bare(ODD, RATE), qemu.machine(), &[qemu; 3]);
    }
}

/// With the oldest QEMU's machine type, and an operating system that uses it.
#[runs(promised)]
#[test]
fn up_to_the_newest_and_down_again() {
    let all = qemus();
    let there: Vec<&Qemu> = all.iter().chain(all.iter().rev().skip(1)).collect();
    along(guest(ODD, RATE), all[0].machine(), &there);
}

/// From the oldest to the newest directly, and back.
#[test]
fn past_those_between() {
    let all = qemus();
    let (oldest, newest) = (&all[0], &all[all.len() - 1]);
    along(bare(ODD, RATE), oldest.machine(), &[oldest, newest, oldest]);
}

/// QEMU 11.1 and newer can be held only if they are told so when they start. An adopted QEMU was
/// not: it moves all the same, and comes back with a QEMU that the agent has started.
#[test]
fn an_adopted_one_that_cannot_be_held() {
    let all = qemus();
    let Some(qemu) = all.iter().find(|qemu| release(qemu) >= HOLDS_BY_DEVICES) else {
        note("no QEMU 11.1 or newer is here: none that can't be held was moved");
        return;
    };
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", RATE);
    spec.machine = qemu.machine();
    let mut adopted = world.start_unmanaged(Side::A, &spec, &qemu.program, &[]);
    let guest = Guest::meet(spec, &world.hosts.a).unwrap();
    world.attach("web1");
    let moving = world.begin(&guest, Side::A, &[]);
    adopted.wait().unwrap();
    let report = world.arrive(&guest, Side::A, moving);
    assert!(notes_a_hold_that_is_missing(&report), "{:?}", report.notes);
    let report = world.migrate(&guest, Side::B, &[]);
    assert!(!notes_a_hold_that_is_missing(&report), "{:?}", report.notes);
}

/// A VM whose QEMU loses writes moves only if that is accepted, whichever command moves it.
#[test]
fn one_that_loses_writes() {
    let all = qemus();
    let (oldest, newest) = (&all[0], &all[all.len() - 1]);
    let world = World::new(Link::one(1000));
    if !world.kit.loses_writes(oldest) {
        note("no QEMU that loses writes is here: none was refused");
        return;
    }
    let guest = world.boot_with(&bare(ODD, RATE), &oldest.program);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let typed = |args: &[&str]| {
        let mut command = world.agent(Side::A).command_as_typed(world.host(Side::A), args);
        let output = command.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).unwrap())
    };
    for args in [
        &["migrate", "web1", "host-b"][..],
        &["gang", "web1=host-b"],
        &["evacuate", "host-a"],
        &["evacuate", "host-a", "--dry-run"],
        &["doctor", "host-b"],
    ] {
        let (code, said) = typed(args);
        assert_eq!(code, Some(1), "{args:?}: {said}");
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(WHY) && said.contains("--accept-lost-writes"), "{args:?}: {said}");
    }
    let (code, said) = typed(&["predict", "web1", "host-b", "--rate", "1G"]);
    assert!(code == Some(0) && said.contains("A move is refused: "), "{said}");
    world.assert_stayed(&guest, Side::A, pid);

    let report = world.migrate(&guest, Side::A, &["--accept-lost-writes"]);
    assert!(report.notes.iter().any(|note| note == WHY), "{:?}", report.notes);

    let mut spec = bare("64M", 0);
    spec.name = "web2".to_owned();
    spec.machine = newest.machine();
    spec.extra.push("-S".to_owned());
    world.run(&spec, &newest.program, &[]);
    let (code, said) = typed(&["migrate", "web2", "host-b"]);
    assert_eq!(code == Some(1), world.kit.loses_writes(newest), "{said}");
}

#[runs(promised)]
#[test]
fn doctor_knows_each() {
    let all = qemus();
    let world = World::new(Link::unshaped());
    for (nth, qemu) in all.iter().enumerate() {
        let mut spec = bare("64M", 0);
        spec.name = format!("web{nth}");
        spec.machine = qemu.machine();
        spec.extra.push("-S".to_owned());
        world.run(&spec, &qemu.program, &[]);
    }
    let text = world.tells(Side::A, &["doctor", "--json"]);
    let found: Examination = serde_json::from_str(&text).unwrap();
    for qemu in &all {
        let version = format!("QEMU {}", qemu.version);
        let of_it = found.findings.iter().filter(|one| one.text.contains(&version));
        let texts: Vec<&str> = of_it.map(|one| one.text.as_str()).collect();
        let has = |words: &str| texts.iter().any(|text| text.contains(words));
        assert!(has(&format!("{version}: ")), "{texts:?}");
        let says = has("lets an agent decide");
        assert_eq!(says, release(qemu) >= HOLDS_BY_DEVICES, "{texts:?}");
        assert!(!has("is newer than those"), "{texts:?}");
    }
}

/// The older QEMU doesn't know the newer one's machine type, which is reported before anything
/// moves.
#[test]
fn a_machine_that_the_destination_does_not_know() {
    let all = qemus();
    let (oldest, newest) = (&all[0], &all[all.len() - 1]);
    if release(oldest) == release(newest) {
        note(&format!(
            "only QEMU {} is here: none was asked for another's machine",
            oldest.version
        ));
        return;
    }
    let world = World::new(Link::one(1000));
    let guest = world.boot_with(&bare(ODD, RATE), &newest.program);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let set = format!("{}={}", newest.program.display(), oldest.program.display());
    let why = world.refuses(Side::A, &["migrate", "web1", "host-b", "--set", &set]);
    assert!(why.contains("machine"), "{why}");
    world.assert_stayed(&guest, Side::A, pid);
}
