//! What arrived is compared with what QEMU handed over before the source gives up the VM. A
//! difference keeps the VM at its source.

use api::{Audited, Outcome, Phase, Report};
use end_to_end::memory::guest_ram;
use end_to_end::proxy::{Proxies, is_text};
use end_to_end::{MIB, Side, World, bare, own_qmp_argument, until};
use lab::hosts::Link;
use marks::runs;
use ram::{DataRanges, Mapping};

const PAGE: usize = 4096;

fn differences(report: &Report) -> (u64, &[String]) {
    let Outcome::Failed(why) = &report.outcome else { panic!("{:?}", report.outcome) };
    assert!(why.contains("the audit found") && why.contains("stays where it was"), "{why}");
    let Audited::Differences { pages, examples } = &report.audit else { panic!("{why}") };
    (*pages, examples)
}

#[runs(promised)]
#[test]
fn a_bit_that_flips_on_the_way() {
    let mut world = World::new(Link::one(400));
    let proxies = Proxies::start(&world.hosts, 1);
    let guest = world.boot(&bare("256M", 5_000_000));
    let peers = Proxies::peers(&world.hosts);
    world.tell_agents(vec!["--peers".to_owned(), peers]);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    proxies.flip_a_bit(Side::A);
    let moving = world.begin(&guest, Side::A, &["--compress", "off", "--audit", "on"]);
    let ended = moving.wait();
    assert!(proxies.has_flipped());
    let (pages, examples) = differences(&ended.report);
    assert_eq!((pages, examples.len()), (1, 1), "{examples:?}");
    assert!(examples[0].contains("sent by the source"), "{examples:?}");
    world.assert_stayed(&guest, Side::A, pid);
    // The failed migration leaves nothing behind.
    drop(world.migrate(&guest, Side::A, &[]));
}

/// Offset of a page of text in the RAM of the waiting QEMU, as soon as it has one.
fn placed_text(ram: &Mapping) -> u64 {
    let mut found = None;
    until("text is placed", || {
        let DataRanges::Known(ranges) = ram.data_ranges().unwrap() else { panic!() };
        let mut bytes = vec![0; PAGE];
        let mut pages = ranges.iter().flat_map(|range| range.clone().step_by(PAGE));
        found = pages.find(|offset| {
            ram.read(*offset, &mut bytes).unwrap();
            // A page's first word is random.
            is_text(&bytes[8..])
        });
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn ram_that_changes_after_it_was_written() {
    let world = World::new(Link::one(400));
    let mut spec = bare("256M", 100_000);
    spec.extra.extend(own_qmp_argument("web1"));
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let mut moving = world.begin(&guest, Side::A, &["--limit", "80M", "--audit", "deep"]);
    moving.wait_for(Phase::FirstPass);
    let ram = guest_ram(&world, Side::B, "web1", 256 * MIB);
    ram.write(placed_text(&ram) + 100, b"\x01").unwrap();
    let ended = moving.wait();
    let (pages, examples) = differences(&ended.report);
    assert_eq!(pages, 1, "{examples:?}");
    assert!(examples[0].contains("not in RAM as it was placed"), "{examples:?}");
    world.assert_stayed(&guest, Side::A, pid);
}
