//! A VM gets another QEMU on its host, and programs of the host find that one where they found the
//! former one: its VNC server, a port of its guest, its monitor and its PID file.

use end_to_end::addresses::{addresses, assert_addresses, assert_no_pid_file};
use end_to_end::{OwnProgram, Side, World, bare};
use lab::guest::GuestSpec;
use lab::hosts::Link;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";
const RATE: u64 = 2_000_000;
/// By which options of `run` a VM has RAM of QEMU's own, or in files of the agent's.
const RAMS: [&[&str]; 2] = [&[], &["--hand-over"]];

fn spec(more: impl IntoIterator<Item = String>) -> GuestSpec {
    let mut spec = bare(ODD, RATE);
    spec.extra.extend(more);
    spec
}

/// Again and again, and after moves to another host, where it starts with all of them.
#[test]
fn clients_find_the_new_qemu_at_the_same_addresses() {
    for options in RAMS {
        let mut world = World::new(Link::one(1000));
        let program = OwnProgram::new(&mut world);
        let guest = world.boot_by(&spec(addresses()), &program.path, options);
        assert_addresses(&world, Side::A);
        for _ in 0..2 {
            drop(world.upgrade(&guest, Side::A, &[]));
            assert_addresses(&world, Side::A);
        }
        drop(world.migrate(&guest, Side::A, &[]));
        assert_no_pid_file(&world, Side::A);
        assert_addresses(&world, Side::B);
        drop(world.upgrade(&guest, Side::B, &[]));
        assert_addresses(&world, Side::B);
    }
}

/// The former one's password is not known, and a port has no name that could change its socket.
#[test]
fn what_cannot_be_taken_over_is_refused_by_its_name() {
    for (arguments, why) in [
        (["-vnc", "127.0.0.1:7,password=on"], "-vnc listens for clients"),
        (["-qmp", "tcp:127.0.0.1:4444,server=on,wait=off"], "-qmp is connected to something"),
        (["-gdb", "tcp:127.0.0.1:4444"], "-gdb is connected to something"),
    ] {
        let mut world = World::new(Link::unshaped());
        let program = OwnProgram::new(&mut world);
        let spec = spec(arguments.map(str::to_owned));
        let guest = world.boot_by(&spec, &program.path, &["--hand-over"]);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        let refused = world.refuses(Side::A, &["upgrade", "web1"]);
        assert!(refused.contains(why), "{refused}");
        world.assert_stayed(&guest, Side::A, pid);
        world.assert_nothing_else(Side::A);
    }
}
