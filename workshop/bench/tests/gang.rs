//! A gang moves from one rack to another, and the links count what crosses them. Needs root.

use std::time::Duration;

use bench::contender::Mode;
use bench::contender::gang::{GangContender, GangGround, Member, QemuGang};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Layout, Racks};
use lab_guest::orders::Orders;

const MIB: u64 = 1 << 20;

/// Content that all VMs have, some of the VM's own, and a file that it writes if it moves.
fn orders(seed: u64) -> Orders {
    Orders {
        seed,
        common_seed: 5,
        common_bytes: 8 * MIB,
        random_bytes: 4 * MIB,
        file_bytes: 4 * MIB,
        file_rate: MIB,
        tick_ms: 50,
        ..Orders::default()
    }
}

#[test]
fn two_vms_move_between_racks_and_one_stays() {
    let kit = lab::setup::ensure().unwrap();
    let layout = Layout { source_racks: 1, source_hosts: 2, target_hosts: 1, ..Layout::default() };
    let racks = Racks::new(layout).unwrap();
    let (sources, target) = (racks.sources(), racks.targets()[0]);
    let member = |nth: u8, from, to: Option<_>| {
        let (name, orders) = (format!("vm{nth}"), orders(nth.into()));
        let spec = if to.is_some() {
            GuestSpec::new(&name, "128M", orders)
        } else {
            // An operating system only for QEMU's own migration, which loses pages without one
            // under TCG, and for the file.
            GuestSpec::bare(&name, "128M", Orders { file_bytes: 0, file_rate: 0, ..orders })
        };
        Member { spec, from, to }
    };
    let members = [
        member(1, sources[0], Some(target)),
        member(2, sources[1], Some(target)),
        member(3, target, None),
    ];
    let listen = |member: &Member<'_>| Guest::listen(member.spec.clone(), &member.from.host);
    let guests: Vec<Guest> = members.iter().map(|member| listen(member).unwrap()).collect();
    let ground = GangGround {
        kit: &kit,
        racks: &racks,
        downtime_goal: Duration::from_millis(300),
        timeout: Duration::from_secs(120),
    };
    let mut gang = QemuGang::new(Mode::Precopy);
    gang.start(&ground, &members).unwrap();
    for (guest, member) in guests.iter().zip(&members) {
        guest.wait_boot(&member.from.host).unwrap();
        if let Some(to) = member.to {
            guest.expect_on(&to.host).unwrap();
        }
    }
    let before = racks.crossed().unwrap();
    let moved = gang.migrate(&ground, &members).unwrap();
    let crossed = racks.crossed().unwrap() - before;
    assert_eq!(moved.vms.len(), 2);
    assert!(moved.vms.iter().all(|vm| vm.began == moved.began && vm.ran <= moved.ran()));
    // QEMU sends each VM's content, even if others have the same.
    assert!(crossed.from_sources > 2 * 16 * MIB, "{crossed:?}");
    assert!(crossed.from_target < crossed.from_sources / 10, "{crossed:?}");
    for guest in &guests {
        guest.wait_beat(Duration::from_secs(20)).unwrap();
        let checked = guest.check().unwrap();
        let orders = &guest.spec.orders;
        let filled = orders.common_bytes + orders.random_bytes + orders.file_bytes;
        assert_eq!((checked.pages, checked.wrong), (filled / 4096, 0), "{checked:?}");
        assert_eq!(guest.pulse().twice, 0);
        assert_eq!(guest.pulse().written.disk_pages > 0, orders.file_bytes > 0);
    }
    gang.stop();
}
