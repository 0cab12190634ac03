//! A guest boots, answers, and finds its memory as it wrote it. Needs root.

use std::process::Stdio;

use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Hosts, Link};
use lab_guest::orders::Orders;

#[test]
fn a_guest_boots_writes_and_checks_itself() {
    let kit = lab::setup::ensure().unwrap();
    let hosts = Hosts::new(Link::unshaped()).unwrap();
    let orders = Orders {
        random_bytes: 16 << 20,
        text_bytes: 8 << 20,
        working_set_bytes: 8 << 20,
        rate: 2 << 20,
        ..Orders::default()
    };
    let spec = GuestSpec::new("g", "256M", orders);
    let argv = spec.argv(&kit, &kit.qemu);
    let mut qemu = hosts.a.command(&argv[0]).args(&argv[1..]).stdin(Stdio::null()).spawn().unwrap();
    let guest = Guest::meet(spec, &hosts.a).unwrap();
    let checked = guest.check().unwrap();
    assert_eq!(checked.wrong, 0, "{checked:?}");
    assert_eq!(checked.pages, (32 << 20) / 4096);
    guest.wait_beat(std::time::Duration::from_secs(5)).unwrap();
    drop(hosts);
    qemu.wait().unwrap();
}
