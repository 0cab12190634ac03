//! A storage host: both hosts write to its disk over links of their own, and nothing is left
//! behind. Needs root.

use std::io::Write;

use lab::hosts::{Hosts, Link, Storage};

#[test]
fn both_hosts_use_one_disk_and_each_link_is_counted() {
    let hosts = Hosts::new(Link::one(100)).unwrap();
    let storage = Storage::join(&hosts).unwrap();
    let mut image = tempfile::NamedTempFile::new().unwrap();
    image.write_all(&vec![7; 4 << 20]).unwrap();
    storage.serve(image.path(), None).unwrap();
    storage.shape(400).unwrap();

    let qemu_io = |host: &lab::hosts::Host, what: &str| {
        let nbd = "nbd://10.79.0.10:10809/data";
        let arguments = ["-f", "raw", "-c", what, nbd];
        let output = host.command("qemu-io").args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && !said.contains("failed"), "{output:?}");
    };
    let (network, before) = (hosts.traffic().unwrap(), storage.crossed_at_b().unwrap());
    qemu_io(&hosts.a, "read -P 7 0 4M");
    qemu_io(&hosts.a, "write -P 9 1M 1M");
    let beside = storage.crossed_at_b().unwrap() - before;
    assert!(beside < 10_000, "host a's link is another one, and {beside} bytes crossed b's");
    qemu_io(&hosts.b, "read -P 9 1M 1M");
    let crossed = storage.crossed_at_b().unwrap() - before - beside;
    assert!((1 << 20..(1 << 20) + (100 << 10)).contains(&crossed), "{crossed}");
    let network = (hosts.traffic().unwrap() - network).bytes;
    assert!(network < 10_000, "{network} bytes of it crossed the network");

    // A change of the rate keeps the count.
    storage.shape(40).unwrap();
    assert!(storage.crossed_at_b().unwrap() >= before + crossed);
    // Only the copy was written to.
    assert!(std::fs::read(image.path()).unwrap().iter().all(|byte| *byte == 7));
    let name = format!("{}s", hosts.a.name.trim_end_matches('a'));
    drop(storage);
    let list = std::process::Command::new("ip").args(["netns", "list"]).output().unwrap();
    assert!(!String::from_utf8(list.stdout).unwrap().contains(&name));
}
