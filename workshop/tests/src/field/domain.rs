//! A libvirt domain whose migrations agents carry, and what its owner does with it by `virsh` after
//! them.

use lab::guest::Guest;
use lab::hosts::{Link, RUN_DIR};
use lab::libvirt::{Disk, Domain, Migration};
use lab::setup::Qemu;

use super::{Act, Done, NAME, OTHER_VM, Row, Stream};
use crate::disk::assert_disk_intact;
use crate::libvirt::carried::Carried;
use crate::{MIB, Side, assert_intact, guest};

const RATE: u64 = 5_000_000;
const DISK_BYTES: u64 = 64 * MIB;
const DISK_WRITTEN: u64 = 8 * MIB;
const RESIZED_BYTES: u64 = 96 * MIB;

/// A moved domain, with a guest of the lab's own and a disk that moves with it.
pub struct CarriedDomain {
    // Before its hosts, which it would miss.
    guest: Guest,
    carried: Carried,
    stream: Stream,
    side: Side,
    disk_bytes: u64,
}

impl CarriedDomain {
    /// Starts it at A, and moves it so many times.
    ///
    /// # Panics
    /// If it doesn't arrive well.
    #[must_use]
    pub fn moved(stream: Stream, moves: u32) -> Self {
        let carried = Carried::new(Link::one(1000));
        let kit = &carried.world.kit;
        let qemu = Qemu { program: kit.qemu.clone(), version: kit.qemu_version };
        let mut spec = guest("256M", RATE);
        spec.no_reboot = false;
        // Both are checked after each row.
        (spec.orders.random_bytes, spec.orders.text_bytes) = (4 * MIB, 2 * MIB);
        spec.orders.working_set_bytes = 4 * MIB;
        spec.orders.disk_bytes = DISK_WRITTEN;
        spec.orders.disk_rate = MIB / 4;
        let mut domain = Domain::new(spec);
        domain.disks = vec![disk(&carried, Side::A, DISK_BYTES)];
        let guest = carried.world.start(&domain, &qemu);
        let mut vm = Self { guest, carried, stream, side: Side::A, disk_bytes: DISK_BYTES };
        vm.move_on(moves);
        vm
    }

    /// Moves it to the other host, so many times.
    ///
    /// # Panics
    /// If it doesn't arrive well.
    pub fn move_on(&mut self, moves: u32) {
        for _ in 0..moves {
            // As large as it is now, or libvirt refuses to copy it.
            let _ = disk(&self.carried, self.side.other(), self.disk_bytes);
            let parallel = Some(self.stream.channels()).filter(|channels| *channels > 0);
            let how = Migration { parallel, copy_storage: true, ..Migration::default() };
            self.carried.migrate(&self.guest, self.side, &how);
            self.side = self.side.other();
        }
    }

    /// Does what a row says.
    ///
    /// # Errors
    /// If it can't be done, or the row is for another VM.
    pub fn does(&mut self, row: &Row) -> Done {
        match row.act {
            Act::OfDomain(act) => act(self),
            Act::OfDebian(_) => Err(OTHER_VM.to_owned()),
        }
    }

    /// Asserts that it lives: its memory and disk are as they were written.
    ///
    /// # Panics
    /// If they aren't.
    pub fn assert_lives(&self) {
        assert_intact(&self.guest);
        assert_disk_intact(&self.guest);
    }

    /// Commands of its owner, each of which must succeed.
    fn virsh(&self, commands: &[&[&str]]) -> Done {
        let world = &self.carried.world;
        for command in commands {
            let output = world.daemon(self.side).tells(world.host(self.side), command);
            output.map_err(|error| error.to_string())?;
        }
        Ok(String::new())
    }
}

/// Makes the image for its disk at a host.
fn disk(carried: &Carried, side: Side, bytes: u64) -> Disk {
    Disk::make(carried.world.host(side), "disk.img", "qcow2", bytes).unwrap()
}

pub(super) fn suspend_and_resume(vm: &mut CarriedDomain) -> Done {
    vm.virsh(&[&["suspend", NAME], &["resume", NAME], &["domstats", NAME]])
}

pub(super) fn resize_disk(vm: &mut CarriedDomain) -> Done {
    let size = format!("{}M", RESIZED_BYTES / MIB);
    let done = vm.virsh(&[&["blockresize", NAME, "vda", &size]])?;
    vm.disk_bytes = RESIZED_BYTES;
    Ok(done)
}

pub(super) fn snapshot_and_commit(vm: &mut CarriedDomain) -> Done {
    let disk = format!("vda,file={RUN_DIR}/overlay");
    vm.virsh(&[
        &["snapshot-create-as", NAME, "--disk-only", "--no-metadata", "--diskspec", &disk],
        &["blockcommit", NAME, "vda", "--active", "--pivot"],
    ])
}

pub(super) fn save_and_restore(vm: &mut CarriedDomain) -> Done {
    let saved = format!("{RUN_DIR}/saved");
    vm.virsh(&[&["save", NAME, &saved]])?;
    let host = vm.carried.world.host(vm.side);
    vm.guest.expect_on(host).map_err(|error| error.to_string())?;
    vm.virsh(&[&["restore", &saved]])
}

pub(super) fn reset(vm: &mut CarriedDomain) -> Done {
    let before = vm.guest.pulse().boots;
    vm.virsh(&[&["reset", NAME]])?;
    vm.guest.wait_boots(before + 1).map_err(|error| error.to_string())?;
    Ok(String::new())
}

pub(super) fn move_on(vm: &mut CarriedDomain) -> Done {
    vm.move_on(1);
    Ok(String::new())
}
