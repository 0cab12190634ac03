//! `droveway libvirt setup`, read by a real libvirt: where it leads migrations, what an operator
//! can do without agents, and how it is undone.

use std::fs;

use end_to_end::libvirt::LibvirtWorld;
use end_to_end::{Side, assert_intact, guest};
use lab::agent;
use lab::hosts::{Link, RUN_DIR};
use lab::libvirt::{Domain, Migration, WAITS_AT};

const RATE: u64 = 5_000_000;
const QEMU_CONF: &str = "/etc/libvirt/qemu.conf";

impl World {
    /// Runs `droveway libvirt setup` on a host, which must succeed, and has libvirtd read the
    /// result.
    fn setup(&mut self, side: Side, more: &[&str]) -> String {
        let host = self.world.host(side);
        let mut command = host.command(agent::binary());
        command.args(["libvirt", "setup", "--config", &format!("{RUN_DIR}/agent.toml")]);
        let output = command.args(more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        self.world.kill_daemon(side);
        self.world.start_daemon(side);
        said
    }

    fn conf(&self, side: Side) -> String {
        fs::read_to_string(self.world.host(side).path(QEMU_CONF)).unwrap()
    }
}

struct World {
    world: LibvirtWorld,
}

#[test]
fn a_host_without_agents_refuses_and_can_be_bypassed_and_undone() {
    let mut world = World { world: LibvirtWorld::new(Link::one(1000)) };
    for side in [Side::A, Side::B] {
        let host = world.world.host(side);
        let own = format!("name = '{}'\npeers = 'peers.toml'\n[carry]\n", side.name());
        fs::write(host.run_dir.join("agent.toml"), own).unwrap();
        fs::write(host.run_dir.join("peers.toml"), agent::peers(&world.world.hosts)).unwrap();
    }
    let before = world.conf(Side::B);
    let said = world.setup(Side::B, &[]);
    assert!(said.contains("  migration_host = \"127.7.0.2\"\n"), "{said}");
    let only_here = format!("  migration_address = \"{WAITS_AT}\"\n");
    assert!(said.contains(&only_here), "other hosts reach QEMUs that wait: {said}");
    let again = world.setup(Side::B, &[]);
    assert!(again.contains("already"), "{again}");

    let qemu = world.world.qemus().pop().unwrap();
    let guest = world.world.start(&Domain::new(guest("256M", RATE)), &qemu);
    for how in [Migration::default(), Migration { parallel: Some(2), ..Migration::default() }] {
        let ended = world.world.end(world.world.begin(&guest, Side::A, &how));
        assert!(!ended.success && ended.said.contains("refused"), "{}", ended.said);
        world.world.assert_only_at(&guest, Side::A);
        assert_intact(&guest);
    }

    let there = world.world.hosts.b.addresses[0].to_string();
    let (uri, listen) = (format!("tcp://{there}"), ["--listen-address".to_owned(), there]);
    let said = world.setup(Side::B, &["--fallback"]);
    assert!(said.contains(&format!("--migrateuri {uri} {}", listen.join(" "))), "{said}");
    let direct = Migration { uri: Some(uri), more: listen.to_vec(), ..Migration::default() };
    world.world.migrate(&guest, Side::A, &direct);
    world.world.migrate(&guest, Side::B, &Migration::default());

    drop(world.setup(Side::B, &["--undo"]));
    assert_eq!(world.conf(Side::B), before);
    world.world.migrate(&guest, Side::A, &Migration::default());
}
