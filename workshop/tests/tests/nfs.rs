//! A VM whose images are on an NFS server that its QEMU is a client of: no host has them mounted.

use api::Audited;
use end_to_end::files::{Reached, SERIALS, assert_cached_files, image, wait_helper, with_files_by};
use end_to_end::{Side, World, note};
use lab::hosts::{Link, Storage};
use lab::setup;
use marks::runs;

const NAME: &str = "web1";
// On a busy machine the helper, which gives way to others in its guest, gets little CPU time.
const FROM_DISKS: [&str; 4] = ["--storage", "on", "--helper-budget", "time=60s"];

/// The destination reads there what the guest has in its page cache. That both hosts see the same
/// images need not be given as an option.
#[runs(fills)]
#[test]
fn has_its_page_cache_read_there() {
    let world = World::new(Link::one(150));
    let nfs = match setup::nfs(&world.kit) {
        Ok(nfs) => nfs,
        Err(error) => return note(&format!("no image was on NFS: {error}")),
    };
    let storage = Storage::join(&world.hosts).unwrap();
    let spec = with_files_by(&world, Reached::Nfs);
    let _server = storage.serve_nfs(&nfs, &SERIALS.map(|serial| image(&world, serial))).unwrap();
    let guest = world.boot(&spec);
    for from in [Side::A, Side::B] {
        wait_helper(&world, from, NAME);
        let report = world.migrate(&guest, from, &FROM_DISKS);
        println!("{} bytes from disks: {:?}", report.stored_bytes, report.notes);
        // How many depends on the speed of the network and the disks.
        assert!(report.stored_bytes > 0, "{:?}", report.notes);
        let is_left_out = |note: &String| note.contains("is not read");
        assert!(!report.notes.iter().any(is_left_out), "{:?}", report.notes);
        assert!(matches!(report.audit, Audited::Same { .. }), "{:?}", report.audit);
    }
    // A wrong page would have stayed wrong.
    assert_cached_files(&guest);
}
