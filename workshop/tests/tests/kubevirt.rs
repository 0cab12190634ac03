//! KubeVirt's VMs: each in a pod with a libvirtd of its own, moved as KubeVirt moves them, between
//! virt-handlers; agents next to these carry the migrations.

use std::io::Write;
use std::os::unix::net::UnixStream;

use end_to_end::disk::assert_disk_intact;
use end_to_end::libvirt::carried::Carried;
use end_to_end::libvirt::virt_handlers::{PORTS, VirtHandlers};
use end_to_end::{MIB, Side, assert_intact, bare, guest, until};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use lab::libvirt::{Disk, Domain, Migration};
use marks::runs;

/// UID of the VM.
const UID: &str = "8a9c3f6e-0d5b-4f3e-9c62-6a1f5e7d2b10";
const RATE: u64 = 5_000_000;
/// The first bytes of a multifd channel.
const CHANNEL_MAGIC: u32 = 0x1122_3344;

/// KubeVirt's parameters for libvirt (`generateMigrationParams`, `generateMigrationFlags`).
fn way(carried: &Carried, from: Side, parallel: Option<u8>, disks: bool) -> Migration {
    let pod = carried.world.daemon(from).pod().unwrap();
    let uri = |port| format!("unix://{}", pod.socket(Some(port)));
    Migration {
        p2p: true,
        parallel,
        uri: Some(uri(PORTS[0])),
        copy_storage: disks,
        disks_uri: disks.then(|| uri(PORTS[1])),
        more: ["--persistent", "--undefinesource"].map(str::to_owned).to_vec(),
    }
}

fn start(carried: &Carried, spec: GuestSpec) -> Guest {
    start_domain(carried, &Domain::new(spec))
}

fn start_domain(carried: &Carried, domain: &Domain) -> Guest {
    let qemu = carried.world.qemus().pop().unwrap();
    carried.world.start(domain, &qemu)
}

fn with_disk(carried: &Carried) -> Guest {
    let mut spec = guest("256M", RATE);
    (spec.orders.disk_bytes, spec.orders.disk_rate) = (32 * MIB, MIB);
    let mut domain = Domain::new(spec);
    domain.disks = vec![image(carried, Side::A)];
    start_domain(carried, &domain)
}

fn image(carried: &Carried, side: Side) -> Disk {
    Disk::make(carried.world.host(side), "disk.img", "qcow2", 256 * MIB).unwrap()
}

/// There by one connection, back by four: the agents carry all of it, and restore the sockets that
/// they replaced.
#[runs(promised)]
#[test]
fn what_leaves_a_pod_is_carried() {
    let carried = Carried::in_pods(Link::one(1000), UID);
    let guest = start(&carried, bare("256M", RATE));
    for (from, parallel) in [(Side::A, None), (Side::B, Some(4))] {
        let handlers = VirtHandlers::open(&carried.world, from);
        carried.wait_until_it_leads_here(from, PORTS[0]);
        carried.migrate(&guest, from, &way(&carried, from, parallel, false));
        assert_eq!(handlers.by_ports().unwrap_or_default(), 0);
        assert_eq!(carried.report(from).to, from.other().name());
    }
}

/// With no agent at the destination, and with one that has ended since it agreed.
#[test]
fn without_an_agent_there_it_goes_kubevirts_own_way() {
    let mut carried = Carried::in_pods(Link::one(1000), UID);
    // Under TCG QEMU's own migration loses pages of a guest without an operating system.
    let guest = start(&carried, guest("256M", RATE));
    let handlers = VirtHandlers::open(&carried.world, Side::A);
    carried.wait_until_it_leads_here(Side::A, PORTS[0]);
    carried.kill_agent(Side::B);
    let how = way(&carried, Side::A, Some(2), false);
    carried.world.migrate(&guest, Side::A, &how);
    // The main connection, and both channels.
    assert!(handlers.by_ports().is_none_or(|connections| connections == 3));
    drop(handlers);

    let handlers = VirtHandlers::open(&carried.world, Side::B);
    carried.world.migrate(&guest, Side::B, &way(&carried, Side::B, None, false));
    assert!(handlers.by_ports().is_none_or(|connections| connections == 1));
    assert!(carried.last(Side::A).is_none());
}

/// Its main connection went to virt-handler just before the agent took over the socket.
#[test]
fn a_channel_without_its_main_connection_goes_kubevirts_own_way() {
    let carried = Carried::in_pods(Link::one(1000), UID);
    let _guest = start(&carried, bare("256M", RATE));
    let handlers = VirtHandlers::open(&carried.world, Side::A);
    carried.wait_until_it_leads_here(Side::A, PORTS[0]);
    let (pod, host) = (carried.world.daemon(Side::A).pod().unwrap(), carried.world.host(Side::A));
    let socket = format!("/proc/{}/root{}", pod.pid(host).unwrap(), pod.socket(Some(PORTS[0])));
    let mut channel = UnixStream::connect(socket).unwrap();
    channel.write_all(&CHANNEL_MAGIC.to_be_bytes()).unwrap();
    until("virt-handler has it", || handlers.by_ports().is_none_or(|connections| connections == 1));
    assert!(carried.last(Side::A).is_none());
}

/// A killed agent leaves a socket that leads nowhere: the migration fails, the VM runs on, and the
/// restarted agent repairs it.
#[runs(requested)]
#[test]
fn an_agent_that_starts_again_takes_up_its_sockets() {
    let mut carried = Carried::in_pods(Link::one(1000), UID);
    let guest = start(&carried, bare("256M", RATE));
    let _handlers = VirtHandlers::open(&carried.world, Side::A);
    carried.wait_until_it_leads_here(Side::A, PORTS[0]);
    carried.kill_agent(Side::A);
    let how = way(&carried, Side::A, None, false);
    let ended = carried.world.end(carried.world.begin(&guest, Side::A, &how));
    assert!(!ended.success, "{ended:?}");
    carried.world.assert_only_at(&guest, Side::A);
    assert_intact(&guest);
    carried.start_agent(Side::A);
    carried.wait_until_it_leads_here(Side::A, PORTS[0]);
    carried.migrate(&guest, Side::A, &how);
}

#[runs(requested)]
#[test]
fn a_vm_comes_with_its_disk() {
    let carried = Carried::in_pods(Link { nics: 2, mbit_per_s: Some(500) }, UID);
    let guest = with_disk(&carried);
    let _ = image(&carried, Side::B);
    let handlers = VirtHandlers::open(&carried.world, Side::A);
    for port in PORTS {
        carried.wait_until_it_leads_here(Side::A, port);
    }
    carried.migrate(&guest, Side::A, &way(&carried, Side::A, None, true));
    assert_eq!(handlers.by_ports().unwrap_or_default(), 0);
    assert_disk_intact(&guest);
}
