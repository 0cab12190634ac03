//! Faults while agents carry libvirt's migrations, at points from the first pages to the last: each
//! time the guest runs on exactly one host, with all it has written, libvirt knows on which, and
//! the guest can be moved again.

use end_to_end::libvirt::carried::Carried;
use end_to_end::{MIB, Side, assert_intact, bare, until};
use lab::guest::Guest;
use lab::hosts::Link;
use lab::libvirt::{Domain, Migration};
use marks::runs;

/// Percentage that has arrived at the time of the fault: the last one is while the VM stops, or
/// after that.
const POINTS: [f64; 5] = [1.0, 25.0, 50.0, 75.0, 99.0];

#[derive(Clone, Copy, Debug)]
enum Fault {
    Agent(Side),
    Libvirtd(Side),
    /// `virsh domjobabort`.
    Abort,
}

/// Each point with another kind of migration: classic and parallel, by `virsh` and by libvirtd.
fn ways() -> impl Iterator<Item = Migration> {
    let ways = [(None, false), (Some(4), false), (Some(4), true), (None, true)];
    let how = |(parallel, p2p)| Migration { parallel, p2p, ..Migration::default() };
    ways.into_iter().cycle().map(how)
}

fn at_each_point(fault: Fault) {
    // Slow, so that a fault comes while the migration is as far as it should be.
    let mut carried = Carried::new(Link::one(40));
    let qemu = carried.world.qemus().pop().unwrap();
    let mut spec = bare("96M", MIB);
    (spec.orders.random_bytes, spec.orders.working_set_bytes) = (24 * MIB, 4 * MIB);
    let guest = carried.world.start(&Domain::new(spec), &qemu);
    for (percent, how) in POINTS.into_iter().zip(ways()) {
        let mut migrating = carried.world.begin(&guest, Side::A, &how);
        until("so much has arrived", || {
            let last = carried.last(Side::A).filter(|last| last.outcome.is_none());
            last.is_some_and(|last| last.percent >= percent) || !migrating.is_running()
        });
        match fault {
            Fault::Agent(side) => carried.kill_agent(side),
            Fault::Libvirtd(side) => carried.world.kill_daemon(side),
            Fault::Abort => {
                let (daemon, host) = (carried.world.daemon(Side::A), carried.world.host(Side::A));
                // The migration may be over.
                let _ = migrating.abort(daemon, host);
            }
        }
        let ended = carried.world.end(migrating);
        println!("{fault:?} at {percent} %, {how:?}: {ended:?}");
        match fault {
            Fault::Agent(side) => carried.start_agent(side),
            Fault::Libvirtd(side) => carried.world.start_daemon(side),
            Fault::Abort => {}
        }
        let at = where_it_runs(&carried, &guest);
        carried.world.assert_only_at(&guest, at);
        assert_intact(&guest);
        // A fault can come too late on a busy machine: then libvirt reports success.
        assert!(
            at == Side::A || percent > 90.0 || ended.success,
            "it has gone, at {percent} %: {ended:?}"
        );
        if at == Side::B {
            carried.migrate(&guest, Side::B, &how);
        }
    }
    carried.migrate(&guest, Side::A, &Migration::default());
}

/// The host whose libvirt reports the guest, once exactly one does: a restarted libvirtd has to
/// find out first.
fn where_it_runs(carried: &Carried, guest: &Guest) -> Side {
    let mut at = None;
    until("a libvirt says where it runs", || {
        let runs = |side: &Side| {
            let state = carried.world.state(*side, &guest.spec.name);
            state.as_deref() == Some("running")
        };
        let mut sides = [Side::A, Side::B].into_iter().filter(runs);
        at = sides.next();
        at.is_some() && sides.next().is_none()
    });
    at.expect("just seen")
}

#[runs(requested)]
#[test]
fn the_sources_agent() {
    at_each_point(Fault::Agent(Side::A));
}

#[runs(requested)]
#[test]
fn the_destinations_agent() {
    at_each_point(Fault::Agent(Side::B));
}

#[runs(requested)]
#[test]
fn the_sources_libvirtd() {
    at_each_point(Fault::Libvirtd(Side::A));
}

#[runs(requested)]
#[test]
fn the_destinations_libvirtd() {
    at_each_point(Fault::Libvirtd(Side::B));
}

#[runs(requested)]
#[test]
fn an_abort() {
    at_each_point(Fault::Abort);
}
