//! Programs that call libvirt by its Python module, with the parameters that they pass: OpenStack's
//! nova and virt-manager. Their migrations are carried.

use std::process::Command;

use end_to_end::libvirt::carried::Carried;
use end_to_end::{Side, assert_intact, guest};
use lab::hosts::Link;
use lab::libvirt::Domain;
use lab::setup;
use marks::runs;

/// nova's `Guest.migrate`: libvirtd talks to libvirtd, with the domain's XML.
const NOVA: &str = "\
flags = (libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_PEER2PEER
         | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE | libvirt.VIR_MIGRATE_PERSIST_DEST)
xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_MIGRATABLE)
params = {libvirt.VIR_MIGRATE_PARAM_DEST_XML: xml,
          libvirt.VIR_MIGRATE_PARAM_PERSIST_XML: xml,
          libvirt.VIR_MIGRATE_PARAM_BANDWIDTH: 0}
domain.migrateToURI3(there, params, flags)
";

/// virt-manager's `vmmDomain.migrate`: the client talks to both.
const VIRT_MANAGER: &str = "\
flags = (libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_PERSIST_DEST
         | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE)
domain.migrate3(libvirt.open(there), {}, flags)
";

/// Runs a script; why it failed, if it did.
fn call(carried: &Carried, from: Side, script: &str) -> Result<(), String> {
    let world = &carried.world;
    let script = format!(
        "import libvirt, sys\nthere = sys.argv[1]\n\
         domain = libvirt.open('qemu:///system').lookupByName(sys.argv[2])\n{script}"
    );
    let mut python: Command = world.host(from).command("python3");
    python.env("PYTHONPATH", setup::python_libvirt().unwrap());
    python.args(["-c", &script, &world.daemon(from.other()).uri(), "web1"]);
    let output = python.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

#[runs(requested)]
#[test]
fn nova_and_virt_manager() {
    let carried = Carried::new(Link::one(1000));
    let qemu = carried.world.qemus().pop().unwrap();
    let guest = carried.world.start(&Domain::new(guest("256M", 5_000_000)), &qemu);
    for (from, script) in [(Side::A, NOVA), (Side::B, VIRT_MANAGER)] {
        guest.expect_on(carried.world.host(from.other())).unwrap();
        assert_eq!(call(&carried, from, script), Ok(()));
        carried.world.assert_only_at(&guest, from.other());
        assert_intact(&guest);
        let report = carried.report(from);
        assert_eq!((report.tap.as_str(), report.placement.as_str()), ("classic", "mapped"));
    }
}
