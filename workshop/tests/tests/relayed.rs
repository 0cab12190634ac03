//! Migrations that another program commands, as a manager does: the tap splits them as long as they
//! can be split, and passes the rest on as it is. Two QEMUs and what is between them, without
//! agents.

use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use audit::Delivery;
use crossbeam_channel::{Receiver, Sender, unbounded};
use end_to_end::{MIB, Side, bare, note, until};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Host, Hosts, Link, RUN_DIR};
use lab::setup::{self, Accelerator, Kit, Qemu};
use marks::runs;
use page::{Batch, Pool};
use parking_lot::{Condvar, Mutex};
use placer::{BlockPlan, Feeder, Placement, Placer};
use qemu::process::Process;
use qemu::qmp::Qmp;
use ram::Mapping;
use serde_json::{Value, json};
use tap::{Head, Output, Stopped, Taken, Tap, Unsplittable};

const POOL_BYTES: usize = 16 << 20;
/// Blocks of this size and larger are written into memory, if at all.
const MAPPED_BYTES_MIN: u64 = 8 * MIB;
/// Less than the guest writes on a busy machine, so that no migration ends too early.
const BANDWIDTH: u64 = 750_000;
/// Several times as much, and yet some of a CPU that emulates: the guest writes all of its working
/// set again in each pass.
const RATE: u64 = 4_000_000;
const RAM_BYTES: u64 = 12 * MIB;
/// How often a migration may end before it is ordered to switch to post-copy.
const TRIES: usize = 4;
/// Longest time that passes take on a busy machine.
const PASSES_MAX: Duration = Duration::from_secs(120);
/// Delay of a batch: long enough that others overtake it, and that QEMU would load what follows RAM
/// if nothing waited.
const LATE: Duration = Duration::from_millis(30);

/// A QEMU that the test starts itself.
struct Vm {
    child: Child,
    qmp: Arc<Qmp>,
}

impl Vm {
    fn start(host: &Host, kit: &Kit, qemu: &Qemu, spec: &GuestSpec, more: &[&str]) -> Self {
        let mut argv = spec.argv(kit, &qemu.program);
        argv.extend(["-qmp".to_owned(), format!("unix:{RUN_DIR}/qmp,server=on,wait=off")]);
        argv.extend(more.iter().map(|word| (*word).to_owned()));
        let mut command = host.command(&argv[0]);
        let child = command.args(&argv[1..]).stdin(Stdio::null()).spawn().unwrap();
        let socket = host.run_dir.join("qmp");
        drop(connect(&socket));
        let qmp = Qmp::connect(&socket, Duration::from_secs(30)).unwrap();
        Self { child, qmp }
    }

    fn tell(&self, command: &str, arguments: Value) -> Value {
        self.qmp.execute(command, arguments).unwrap()
    }

    fn switch_on(&self, capabilities: &[&str]) {
        let on = |name: &&str| json!({ "capability": name, "state": true });
        let list: Vec<_> = capabilities.iter().map(on).collect();
        self.tell("migrate-set-capabilities", json!({ "capabilities": list }));
    }

    fn migration(&self) -> Value {
        self.tell("query-migrate", json!({}))
    }

    /// The guest's memory, which is contiguous.
    fn memory(&self, bytes: u64) -> Mapping {
        let answer = self.tell("human-monitor-command", json!({ "command-line": "gpa2hva 0" }));
        let text = answer.as_str().unwrap().trim();
        let address = u64::from_str_radix(text.rsplit_once("0x").unwrap().1, 16).unwrap();
        let pid = self.qmp.peer_pid().unwrap();
        let process = Process::now(pid).unwrap();
        Mapping::of_process(process.pidfd(), pid, address, bytes).unwrap()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.qmp.execute("quit", json!({}));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How far a stream was split.
#[derive(Default)]
struct Seen {
    pages: u64,
    may_turn_to_postcopy: bool,
    why_not: Option<Unsplittable>,
    rest_bytes: u64,
    tail_bytes: u64,
}

/// Batches that are not yet placed.
#[derive(Default)]
struct InFlight {
    batches: Mutex<usize>,
    changed: Condvar,
}

impl InFlight {
    fn wait_none(&self) {
        let mut batches = self.batches.lock();
        while *batches > 0 {
            self.changed.wait(&mut batches);
        }
    }
}

/// The agents' work between the two QEMUs, in one process: threads place batches late and in any
/// order.
struct Relay {
    feeder: Feeder,
    /// The guest's memory at the destination.
    memory: Arc<Mapping>,
    placer: Mutex<Option<Arc<Placer>>>,
    late: Sender<Batch>,
    in_flight: Arc<InFlight>,
    seen: Mutex<Seen>,
}

impl Relay {
    fn new(destination: &UnixStream, memory: Mapping) -> (Arc<Self>, Receiver<Batch>) {
        let (late, batches) = unbounded();
        let relay = Self {
            feeder: Feeder::start(destination.try_clone().unwrap(), Pool::new(POOL_BYTES)).unwrap(),
            memory: Arc::new(memory),
            placer: Mutex::default(),
            late,
            in_flight: Arc::default(),
            seen: Mutex::default(),
        };
        (Arc::new(relay), batches)
    }

    fn place(&self, batch: &Batch) {
        let placer = Arc::clone(self.placer.lock().as_ref().expect("the head came before"));
        placer.place_fills(batch.block, batch.epoch, batch.fills()).unwrap();
        let pages: Vec<_> = batch.bodies().iter().map(|body| body.page).collect();
        let bytes: Vec<_> =
            batch.bodies().iter().flat_map(|body| batch.bytes_of(*body)).copied().collect();
        placer.place_bodies(batch.block, batch.epoch, &pages, &bytes, Delivery::Body).unwrap();
        *self.in_flight.batches.lock() -= 1;
        self.in_flight.changed.notify_all();
    }
}

impl Output for Relay {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        let plan = |block: tap::Block| {
            let mapped = block.bytes >= MAPPED_BYTES_MIN && !head.may_turn_to_postcopy;
            let placement = if mapped {
                Placement::Mapped(Arc::clone(&self.memory))
            } else {
                Placement::Inline
            };
            BlockPlan { name: block.name, bytes: block.bytes, placement }
        };
        let plans = head.blocks.into_iter().map(plan).collect();
        let placer = Placer::new(plans, self.feeder.handle()).unwrap();
        *self.placer.lock() = Some(Arc::new(placer));
        self.seen.lock().may_turn_to_postcopy = head.may_turn_to_postcopy;
        self.feeder.head(&head.bytes, head.ram_section, head.footers).map_err(|_| Stopped)
    }

    fn batch(&self, batch: Batch) -> Result<(), Stopped> {
        self.seen.lock().pages += batch.guest_bytes() / 4096;
        *self.in_flight.batches.lock() += 1;
        self.late.send(batch).map_err(|_| Stopped)
    }

    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped> {
        self.in_flight.wait_none();
        self.seen.lock().tail_bytes += bytes.len() as u64;
        self.feeder.tail(bytes).map_err(|_| Stopped)
    }

    fn whole(&self, _: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        panic!("it can be split: {reason:?}")
    }

    fn rest(&self, bytes: &[u8], reason: Option<&Unsplittable>) -> Result<(), Stopped> {
        if let Some(reason) = reason {
            self.in_flight.wait_none();
            self.seen.lock().why_not = Some(reason.clone());
        }
        self.seen.lock().rest_bytes += bytes.len() as u64;
        self.feeder.tail(bytes).map_err(|_| Stopped)
    }
}

/// A guest that goes from QEMU to QEMU: to boot one takes seconds where everything is emulated.
struct Trip {
    vm: Vm,
    side: Side,
    guest: Guest,
    hosts: Hosts,
}

/// Both QEMUs of a migration, with the guest at the source.
struct Pair<'t> {
    source: &'t Vm,
    destination: &'t Vm,
    guest: &'t Guest,
    /// The source's host, and the destination's.
    hosts: [&'t Host; 2],
}

/// What is between both QEMUs.
struct Between {
    tap: Tap,
    relay: Arc<Relay>,
    placing: Vec<thread::JoinHandle<()>>,
    answers: thread::JoinHandle<()>,
}

impl Trip {
    fn begin(kit: &Kit, spec: GuestSpec, qemu: &Qemu) -> Self {
        let hosts = Hosts::new(Link::one(1000)).unwrap();
        let vm = Vm::start(&hosts.a, kit, qemu, &spec, &[]);
        let guest = Guest::meet(spec, &hosts.a).unwrap();
        Self { vm, side: Side::A, guest, hosts }
    }

    /// Moves it to this QEMU on the other host, by a migration that may switch to post-copy.
    fn leg(
        &mut self,
        kit: &Kit,
        qemu: &Qemu,
        command: impl Fn(&Pair<'_>, &Between),
        judge: impl Fn(Seen) -> Tried,
    ) -> Tried {
        let hosts = [self.side, self.side.other()].map(|side| side.of(&self.hosts));
        let (source, guest) = (&self.vm, &self.guest);
        let destination = Vm::start(hosts[1], kit, qemu, &guest.spec, &["-incoming", "defer"]);
        let pair = Pair { source, destination: &destination, guest, hosts };
        let between = pair.migrate();
        command(&pair, &between);
        pair.wait_status("completed");
        pair.assert_intact();
        let tried = judge(between.end());
        self.vm = destination;
        self.side = self.side.other();
        tried
    }
}

impl Pair<'_> {
    /// Has the source migrate, and puts the relay in between.
    fn migrate(&self) -> Between {
        for vm in [self.source, self.destination] {
            vm.switch_on(&["events", "return-path"]);
            vm.switch_on(&["postcopy-ram"]);
        }
        let address = format!("unix:{RUN_DIR}/in");
        self.destination.tell("migrate-incoming", json!({ "uri": address }));
        self.guest.expect_on(self.hosts[1]).unwrap();
        // A QEMU that has just taken it refuses to migrate until it has cleared up.
        until("the source has cleared up", || {
            let known = self.source.tell("query-yank", json!({}));
            !known.as_array().unwrap().iter().any(|one| one["type"] == "migration")
        });
        // With a limit of zero QEMU 7.2 completes after the first pass, whatever is dirty.
        let limits = json!({ "downtime-limit": 1, "max-bandwidth": BANDWIDTH });
        self.source.tell("migrate-set-parameters", limits);
        let out = self.hosts[0].run_dir.join("out");
        // That of an earlier migration from this host.
        let _ = fs::remove_file(&out);
        let listener = UnixListener::bind(&out).unwrap();
        self.source.tell("migrate", json!({ "uri": format!("unix:{RUN_DIR}/out") }));
        let (main, _) = listener.accept().unwrap();
        // A QEMU that waits for its stream's first bytes answers no commands.
        let memory = self.destination.memory(RAM_BYTES);
        let onward = connect(&self.hosts[1].run_dir.join("in"));
        let (relay, batches) = Relay::new(&onward, memory);
        let answers = {
            let (from, to) = (onward, main.try_clone().unwrap());
            thread::spawn(move || pass(from, to))
        };
        let placing = (0..3).map(|_| placing(&relay, &batches)).collect();
        let taken = Taken { main, before: Vec::new(), channels: Vec::new() };
        let output = Arc::clone(&relay) as Arc<dyn Output>;
        let tap = Tap::of_taken(taken, Pool::new(POOL_BYTES), output).unwrap();
        Between { tap, relay, placing, answers }
    }

    /// Waits until all of its RAM was taken out once, and some of it again.
    fn wait_later_pass(&self, between: &Between) {
        let pages = || between.relay.seen.lock().pages;
        within("more than all was taken out", || pages() * 4096 > RAM_BYTES + MIB / 4);
    }

    fn let_finish(&self) {
        let limits = json!({ "downtime-limit": 2000, "max-bandwidth": 100_000_000 });
        self.source.tell("migrate-set-parameters", limits);
    }

    fn wait_status(&self, wanted: &str) {
        until(wanted, || {
            let migration = self.source.migration();
            assert_ne!(migration["status"], "failed", "{migration}");
            migration["status"] == wanted
        });
    }

    fn assert_intact(&self) {
        until("the VM runs", || {
            self.destination.tell("query-status", json!({}))["status"] == "running"
        });
        end_to_end::assert_intact(self.guest);
        assert_eq!(self.guest.pulse().boots, 1);
    }
}

impl Between {
    fn end(self) -> Seen {
        self.tap.join().unwrap();
        self.relay.feeder.finish().unwrap();
        self.answers.join().unwrap();
        let seen = std::mem::take(&mut *self.relay.seen.lock());
        // Drops the last sender, so that its receivers end.
        drop(self.relay);
        drop(self.placing);
        seen
    }
}

/// Waits for what a slow guest takes long to do.
fn within(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + PASSES_MAX;
    while !is_so() {
        assert!(Instant::now() < end, "not within {PASSES_MAX:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn connect(path: &Path) -> UnixStream {
    let mut socket = None;
    until("QEMU listens", || {
        socket = UnixStream::connect(path).ok();
        socket.is_some()
    });
    socket.unwrap()
}

/// Passes all bytes on at once.
fn pass(mut from: UnixStream, mut to: UnixStream) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let passed: io::Result<()> = to.write_all(&buffer[..count]);
        if passed.is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

fn placing(relay: &Arc<Relay>, batches: &Receiver<Batch>) -> thread::JoinHandle<()> {
    let (relay, batches) = (Arc::downgrade(relay), batches.clone());
    thread::spawn(move || {
        while let Ok(batch) = batches.recv() {
            // Every third one is late; others overtake it.
            if batch.epoch.0.is_multiple_of(3) {
                thread::sleep(LATE);
            }
            let Some(relay) = relay.upgrade() else { return };
            relay.place(&batch);
        }
    })
}

/// QEMUs that a guest goes through.
#[derive(Clone, Copy)]
enum Route {
    /// From each to itself, and then to the next.
    Up,
    /// From each to itself, and from the oldest to the newest and back.
    All,
}

impl Route {
    fn through(self, all: &[Qemu]) -> Vec<&Qemu> {
        match (self, all) {
            (Self::All, [first, middle @ .., last]) => {
                let ends = [first, first, last, last, first];
                ends.into_iter().chain(middle.iter().flat_map(|one| [one, one])).collect()
            }
            (_, []) => panic!("there is no QEMU to try it with"),
            _ => all.iter().flat_map(|one| [one, one]).collect(),
        }
    }
}

/// A guest under KVM; none if KVM runs no guest. Under TCG, QEMU's own migration loses track of a
/// page that is written all the time if the VM stops after few passes.
fn for_kvm(kit: &Kit) -> Option<GuestSpec> {
    if !setup::kvm_runs_bare(kit).unwrap() {
        note("KVM runs no guest on this machine: nothing was tried without agents");
        return None;
    }
    // Of a machine type that all QEMUs know.
    let mut spec = bare("12M", RATE);
    spec.machine = "pc-q35-7.2".to_owned();
    spec.accelerator = Some(Accelerator::Kvm);
    spec.orders.repeated = true;
    (spec.orders.random_bytes, spec.orders.text_bytes) = (MIB, 0);
    (spec.orders.working_set_bytes, spec.orders.tick_ms) = (MIB / 2, 20);
    Some(spec)
}

/// The result of a try.
enum Tried {
    Judged,
    /// The guest got next to no CPU for a whole pass, so QEMU had too little left to send when it
    /// was ordered to switch.
    Over,
}

/// Moves a guest along a route, by migrations that may switch to post-copy.
fn each(route: Route, command: impl Fn(&Pair<'_>, &Between), judge: impl Fn(Seen) -> Tried) {
    let kit = setup::ensure().unwrap();
    let Some(spec) = for_kvm(&kit) else { return };
    let qemus = setup::qemus(&kit).unwrap();
    let stops = route.through(&qemus);
    let mut trip = Trip::begin(&kit, spec, stops[0]);
    for leg in stops.windows(2) {
        let mut tries = 1;
        while matches!(trip.leg(&kit, leg[1], &command, &judge), Tried::Over) {
            assert!(tries < TRIES, "over too early, each time");
            tries += 1;
            if !ptr::eq(leg[0], leg[1]) {
                // Back to where this leg begins, in whatever way.
                let _ = trip.leg(&kit, leg[0], &command, &judge);
            }
        }
    }
}

fn assert_turned(seen: &Seen) {
    assert!(matches!(seen.why_not, Some(Unsplittable::Postcopy { .. })), "{:?}", seen.why_not);
    assert!(seen.may_turn_to_postcopy && seen.rest_bytes > 0 && seen.tail_bytes == 0);
}

/// In the first pass: most of the VM's memory was not sent at all.
#[runs(fills)]
#[test]
fn a_migration_that_turns_to_postcopy_early() {
    each(
        Route::Up,
        |pair, between| {
            until("it is split", || between.relay.seen.lock().pages > 0);
            pair.source.tell("migrate-start-postcopy", json!({}));
        },
        |seen| {
            assert_turned(&seen);
            if seen.rest_bytes > MIB / 2 { Tried::Judged } else { Tried::Over }
        },
    );
}

/// After a pass: pages that the guest has written since are discarded at the destination.
#[runs(fills)]
#[test]
fn a_migration_that_turns_to_postcopy_late() {
    each(
        Route::All,
        |pair, between| {
            pair.wait_later_pass(between);
            pair.source.tell("migrate-start-postcopy", json!({}));
        },
        |seen| {
            if seen.why_not.is_none() {
                return Tried::Over;
            }
            assert_turned(&seen);
            assert!(seen.pages * 4096 > RAM_BYTES, "{}", seen.pages);
            Tried::Judged
        },
    );
}

#[runs(fills)]
#[test]
fn a_migration_that_may_turn_to_postcopy_and_does_not() {
    each(
        Route::All,
        |pair, between| {
            pair.wait_later_pass(between);
            pair.let_finish();
        },
        |seen| {
            assert!(seen.may_turn_to_postcopy && seen.why_not.is_none());
            assert!(seen.tail_bytes > 0 && seen.rest_bytes == 0);
            Tried::Judged
        },
    );
}
