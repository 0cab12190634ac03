//! A guest boots, answers, and finds its memory as it wrote it. Needs root.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Hosts, Link};
use lab_guest::orders::Orders;

/// Longest time until a guest has booted, also on a busy machine.
const BOOT_MAX: Duration = Duration::from_secs(120);

/// Listens until the guest has sent a beat, and so its first greeting, and leaves without a word.
fn leave_at_first_beat(port: &Path) {
    let until = Instant::now() + BOOT_MAX;
    let stream = loop {
        match UnixStream::connect(port) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < until, "{}: {error}", port.display()),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    stream.set_read_timeout(Some(BOOT_MAX)).unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with('.')));
}

/// The lab may be late: it missed the first greeting.
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
    leave_at_first_beat(&hosts.a.run_dir.join("g.talk"));
    let guest = Guest::meet(spec, &hosts.a).unwrap();
    let checked = guest.check().unwrap();
    assert_eq!(checked.wrong, 0, "{checked:?}");
    assert_eq!(checked.pages, (32 << 20) / 4096);
    guest.wait_beat(Duration::from_secs(5)).unwrap();
    drop(hosts);
    qemu.wait().unwrap();
}
