//! From the VM's stop on, its destination reads a KiB every five seconds; or so much that the
//! kernel keeps the connection. The VM runs again at its source all the same, when its time is over
//! or its operator cancels, and before anything else is waited for.

use std::sync::Arc;
use std::time::Duration;

use api::{Outcome, Phase};
use crossbeam_channel::Receiver;
use end_to_end::proxy::Proxies;
use end_to_end::{Ended, MIB, Moving, Side, World, bare, own_qmp_argument};
use lab::guest::Guest;
use lab::hosts::Link;
use qemu::qmp::{Event, Qmp};

/// The kernel gives up a connection that takes no more than this.
const HARDLY: usize = 1 << 10;
/// The kernel keeps a connection that takes this; a batch of pages takes a minute and more.
const SLOWLY: usize = 16 << 10;
/// For what happens at once, on a busy machine too.
const SOON: Duration = Duration::from_secs(30);

struct Trickling {
    world: World,
    proxies: Proxies,
    guest: Guest,
    pid: u32,
    /// The owner's connection, which receives `events`.
    _owners: Arc<Qmp>,
    events: Receiver<Event>,
}

impl Trickling {
    /// A guest that leaves a second's worth of pages for the end, and agents that reach each other
    /// by a proxy.
    fn new() -> Self {
        let mut world = World::new(Link::one(100));
        let proxies = Proxies::start(&world.hosts, 1);
        world.tell_agents(vec!["--peers".to_owned(), Proxies::peers(&world.hosts)]);
        let mut spec = bare("256M", 25_000_000);
        spec.orders.working_set_bytes = 32 * MIB;
        spec.extra.extend(own_qmp_argument(&spec.name));
        let guest = world.boot(&spec);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        let owners = world.own_qmp(Side::A, "web1");
        let events = owners.events_named(&["STOP", "RESUME"]);
        Self { world, proxies, guest, pid, _owners: owners, events }
    }

    /// Begins to move it, and returns when it is stopped and the trickle begins.
    fn stands_still(&self, reads: usize, args: &[&str]) -> Moving {
        let usual = ["--downtime-ms", "4000", "--throttle", "off", "--compress", "off"];
        let args = [&usual[..], args].concat();
        let moving = self.world.begin(&self.guest, Side::A, &args);
        self.expect("STOP");
        self.proxies.trickle(Side::A, reads);
        moving
    }

    fn expect(&self, name: &str) {
        let event = self.events.recv_timeout(SOON).expect(name);
        assert_eq!(event.name, name);
    }

    /// The VM runs again while the trickle lasts; then the command ends.
    fn goes_on(&self, moving: Moving) -> Ended {
        self.expect("RESUME");
        self.went_on(moving)
    }

    fn went_on(&self, moving: Moving) -> Ended {
        self.guest.wait_beat(SOON).unwrap();
        let ended = moving.wait();
        assert!(!ended.success, "{}", ended.said);
        assert_eq!(ended.report.phases.last().unwrap().phase, Phase::Stopped, "{}", ended.said);
        assert!(self.events.is_empty(), "it stood still once");
        self.guest.wait_beat(SOON).unwrap();
        ended
    }

    /// Asserts that nothing is wrong with it, and has the destination read all again.
    fn stayed(&self) {
        self.proxies.mend();
        self.world.remove_own_sockets(Side::B, "web1");
        self.world.assert_stayed(&self.guest, Side::A, self.pid);
    }

    /// Asserts that it can be moved.
    fn moves(&self) {
        self.guest.ask("rate 1000000").unwrap();
        drop(self.world.migrate(&self.guest, Side::A, &[]));
    }
}

#[test]
fn the_move_is_taken_back_when_its_time_is_over() {
    let trickling = Trickling::new();
    for (tap, reads) in [("multifd", HARDLY), ("classic", SLOWLY)] {
        let moving = trickling.stands_still(reads, &["--blackout-max", "5", "--tap", tap]);
        let ended = trickling.goes_on(moving);
        let Outcome::Failed(why) = &ended.report.outcome else { panic!("{:?}", ended.report) };
        for word in ["--blackout-max", "5.0 s", "KiB", "host-b", "The VM stays where it was"] {
            assert!(why.contains(word), "{word:?} is not in: {why}");
        }
        trickling.stayed();
    }
    trickling.moves();
}

#[test]
fn a_cancel_does_not_wait_for_the_destination() {
    let trickling = Trickling::new();
    let moving = trickling.stands_still(SLOWLY, &["--blackout-max", "100"]);
    // A change that is sent to the destination, too.
    let id = trickling.world.vm(Side::A, "web1").unwrap().migration.unwrap();
    trickling.world.says(Side::A, &["set", &id, "--limit", "50M"]);
    let (read, each_once) = (trickling.proxies.drops(), trickling.proxies.connections());
    moving.interrupt();
    trickling.expect("RESUME");
    let read = trickling.proxies.drops() - read;
    assert!(read <= each_once, "it stood still until the destination had read {read} times more");
    let ended = trickling.went_on(moving);
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    trickling.stayed();
    trickling.moves();
}

#[test]
fn a_timeout_does_not_wait_for_the_destination() {
    let trickling = Trickling::new();
    let moving = trickling.stands_still(SLOWLY, &["--blackout-max", "100", "--timeout", "20"]);
    let ended = trickling.goes_on(moving);
    let Outcome::Failed(why) = &ended.report.outcome else { panic!("{:?}", ended.report) };
    assert!(why.contains("--timeout"), "{why}");
    trickling.stayed();
    trickling.moves();
}
