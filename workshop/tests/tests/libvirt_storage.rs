//! Page cache of a libvirt VM, from disks that both hosts see, with a channel for the helper that
//! its administrator added.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use end_to_end::files::{assert_cached_files, make_images, with_helper};
use end_to_end::libvirt::carried::Carried;
use end_to_end::{Side, until};
use lab::hosts::Link;
use lab::libvirt::{Disk, Domain, Migration};
use qemu::guest_port::{self, PORT_NAME};

const NAME: &str = "web1";

/// The disks have no serial numbers, so they are known by their place on the bus, which depends on the
/// firmware's numbers for libvirt's bridges. Both kinds of stream, there and back: `carry_storage`.
#[test]
fn what_its_disks_have_is_read_there() {
    let carried = Carried::new(Link::one(150));
    let world = &carried.world;
    let shared = tempfile::tempdir().unwrap();
    fs::set_permissions(shared.path(), Permissions::from_mode(0o755)).unwrap();
    let mut domain = Domain::new(with_helper(&world.kit, NAME));
    domain.disks = make_images(shared.path())
        .map(|image| Disk { path: image.display().to_string(), format: "raw" })
        .into();
    domain.channels.push(PORT_NAME.to_owned());
    let guest = world.start(&domain, &world.qemus().pop().unwrap());
    let socket = world.host(Side::A).run_dir.join(format!("{NAME}.{PORT_NAME}"));
    until("the guest's helper answers", || {
        let stream = guest_port::connect(&socket);
        stream
            .and_then(|stream| guest_port::greet(&stream, std::time::Duration::from_secs(3)))
            .is_ok()
    });
    let (parallel, more) = (Some(4), vec!["--unsafe".to_owned()]);
    carried.migrate(&guest, Side::A, &Migration { parallel, more, ..Migration::default() });
    let report = carried.report(Side::A);
    println!("{} from disks, {} by name", report.stored_bytes, report.named_bytes);
    assert!(report.stored_bytes > 0, "{report:#?}");
    assert_cached_files(&guest);
}
