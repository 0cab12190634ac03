//! The most telling rows of the field lab's table (docs/TESTING-RESULTS.md): a Debian as people
//! have it lives on after its moves.

use end_to_end::field::{self, Field, Mover, Row, Stream, Way};
use end_to_end::note;
use lab::field::Machine;
use lab::setup::Release;
use marks::runs;

/// Rows after which the guest goes on without a boot, which would take half a minute of a core.
const QUICK: [&str; 14] = [
    "DHCP lease renewed",
    "link down and up (QMP)",
    "virtio-net unbound and bound",
    "virtio-blk unbound and bound",
    "virtio-serial unbound and bound",
    "balloon down and up",
    "NIC plugged and unplugged",
    "NVMe disk plugged: no move; unplugged",
    "memory plugged and unplugged",
    "disk resized",
    "snapshot taken and committed",
    "moved once more after all of that",
    // After its last move: see that row.
    "vCPU plugged and unplugged",
    "S3 suspend and wake-up",
];

/// Those that are tried after carried moves as well: network, memory, disk, and the whole VM. `make
/// field` tries all of them.
const OF_CARRIED: [&str; 6] = [
    "virtio-net unbound and bound",
    "balloon down and up",
    "memory plugged and unplugged",
    "disk resized",
    "moved once more after all of that",
    "S3 suspend and wake-up",
];

fn lives(mover: Mover, stream: Stream, rows: &[&str]) {
    let snapshot = match field::snapshot(Release::Bookworm, Machine::Virtio) {
        Ok(snapshot) => snapshot,
        Err(error) => return note(&format!("no Debian was moved: {error}")),
    };
    let mut vm = Field::moved(&snapshot, Way { mover, stream }, 2);
    for row in rows {
        let row: &Row = field::named(row);
        // A check after each of them would take longer than they do.
        if let Err(why) = vm.does(row) {
            panic!("{}: {why}", row.name);
        }
    }
    if let Err(why) = vm.lives() {
        panic!("after all of that: {why}");
    }
}

#[test]
fn a_debian_lives_on_after_two_moves() {
    lives(Mover::Own, Stream::Multifd, &QUICK);
}

#[runs(fills)]
#[test]
fn a_carried_debian_lives_on_after_two_moves() {
    lives(Mover::Carried, Stream::Classic, &OF_CARRIED);
}
