//! What the helper in a guest reports of its page cache, compared with the truth: the guest's
//! memory and its disks, both seen from outside; and VMs that move with a helper.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use api::{GuestHelper, Phase};
use cachemap::{Budget, CacheMap, Device, End, Query, QueryFinder, Reason, Reply, Run, Summary};
use end_to_end::files::{
    Kept, MANY_FILES_BYTES, SERIALS, ample, asked, assert_cached_files, cached_pages, compare,
    image, socket, wait_helper, with_files, with_files_on_btrfs, with_files_on_scsi,
};
use end_to_end::{Side, World, bare, own_qmp_argument};
use lab::guest::Guest;
use lab::hosts::Link;
use marks::runs;
use qemu::guest_port::{self, GuestError, Patience};

const NAME: &str = "web1";

/// Asserts that each reported page equals its place on disk.
fn assert_true(world: &World, side: Side, map: &CacheMap) {
    let (equal, first_wrong) = compare(world, side, NAME, map);
    assert_eq!((equal, first_wrong), (map.pages(), None), "{}", map.summary());
}

/// Asserts that, and that nearly all of `cached` pages are reported.
fn assert_told(world: &World, side: Side, map: &CacheMap, cached: u64) {
    assert_true(world, side, map);
    let summary = map.summary();
    assert!(map.pages() * 100 >= cached * 95, "{} of {cached}: {summary}", map.pages());
    assert_eq!((summary.end, summary.pages), (End::Complete, map.pages()), "{summary}");
    let devices: BTreeSet<u16> = map.runs().iter().map(|run| run.device).collect();
    assert_eq!(devices.len(), SERIALS.len(), "files of both disks");
}

fn number(map: &CacheMap, reason: Reason) -> u64 {
    map.summary().left_out.iter().find(|left| left.reason == reason).map_or(0, |left| left.count)
}

fn complete(world: &World, side: Side) -> CacheMap {
    asked(world, side, NAME, ample()).unwrap()
}

#[runs(fills)]
#[test]
fn of_a_quiet_guest_is_reported_correctly() {
    let world = World::new(Link::one(1000));
    let mut spec = with_files(&world);
    spec.orders.files_bytes = MANY_FILES_BYTES;
    let guest = world.boot(&spec);
    let cached = cached_pages(&guest);
    assert!(cached > 5_000, "{cached} pages");
    let before = Kept::by(&guest);
    let map = complete(&world, Side::A);
    // The report put nothing into the guest's caches, and nothing there counts as used by it.
    before.assert_same(&Kept::by(&guest));
    println!("{cached} pages; {}", map.summary());
    assert_told(&world, Side::A, &map, cached);
    assert!(!map.summary().full_walk, "{}", map.summary());
    for device in map.devices() {
        assert!(SERIALS.contains(&device.serial.as_str()), "{device:?}");
        let pci: Vec<&str> = device.address.split([':', '.']).collect();
        assert!(matches!(pci[..], ["0000", "00", _, "0"]), "{device:?}");
    }
    greets_who_comes_and_goes(&world);
    waits_asleep(&world, &guest);
    changes_are_left_out(&world, &guest);
    forgotten_names_are_looked_up(&world, &guest, cached);
    budgets_are_kept(&world);
    world.assert_intact(&guest);
}

/// An agent may disconnect in the middle of an answer, or of a question.
fn greets_who_comes_and_goes(world: &World) {
    let path = socket(world, Side::A, NAME);
    let query = |nonce| Query {
        version: cachemap::VERSION,
        nonce,
        answer: cachemap::AnswerKind::Map,
        budget: ample(),
        runs_max: 1 << 20,
    };
    for nonce in 0..3 {
        let mut stream = guest_port::connect(&path).unwrap();
        stream.write_all(&query(nonce).to_bytes()).unwrap();
        stream.read_exact(&mut [0; 100]).unwrap();
    }
    let mut stream = guest_port::connect(&path).unwrap();
    stream.write_all(&query(9).to_bytes()[..20]).unwrap();
    drop(stream);
    let stream = guest_port::connect(&path).unwrap();
    let greeting = guest_port::greet(&stream, Duration::from_secs(30)).unwrap();
    assert_eq!(greeting.program, env!("CARGO_PKG_VERSION"));
}

/// Whether the port is open or not, the helper is not woken until it is asked.
fn waits_asleep(world: &World, guest: &Guest) {
    let woken = || {
        let answer = guest.ask("helper").unwrap();
        let (_, times) = answer.split_once(':').unwrap();
        times.trim().parse::<u64>().unwrap()
    };
    let stream = guest_port::connect(&socket(world, Side::A, NAME)).unwrap();
    guest_port::greet(&stream, Duration::from_secs(30)).unwrap();
    for (what, stream) in [("with somebody at the port", Some(stream)), ("with nobody", None)] {
        let before = woken();
        // A helper that polls would be woken ten times and more.
        thread::sleep(Duration::from_secs(2));
        let times = woken() - before;
        // After its last answer it goes back to sleep in its own time.
        assert!(times <= 3, "{what}: woken {times} times");
        drop(stream);
    }
}

/// Dirty pages are not reported until they are on disk; then they are, as what follows shows.
fn changes_are_left_out(world: &World, guest: &Guest) {
    let changed = 50;
    assert_eq!(guest.ask(&format!("files-change {changed}")).unwrap(), "pages=100");
    let map = complete(world, Side::A);
    assert_true(world, Side::A, &map);
    // There may be more, where the kernel counts several pages as one.
    assert!(number(&map, Reason::Dirty) >= changed, "{}", map.summary());
    guest.ask("files-sync").unwrap();
}

/// The kernel may have cached content of files whose names it has dropped.
fn forgotten_names_are_looked_up(world: &World, guest: &Guest, cached: u64) {
    guest.ask("files-forget-names").unwrap();
    let map = complete(world, Side::A);
    println!("names forgotten: {}", map.summary());
    assert!(map.summary().full_walk, "{}", map.summary());
    assert_told(world, Side::A, &map, cached);
    guest.ask("files-drop").unwrap();
    let before = Kept::by(guest);
    let map = complete(world, Side::A);
    // All files were opened, which the kernel remembers; none was read.
    let after = Kept::by(guest);
    before.assert_same(&Kept { slab: before.slab, ..after });
    assert!(after.slab < before.slab + (32 << 10), "{before:?}, and later {after:?}");
    assert_true(world, Side::A, &map);
    assert!(map.pages() * 10 < cached, "what was dropped is told: {}", map.summary());
    assert_eq!(cached_pages(guest), cached);
}

fn budgets_are_kept(world: &World) {
    let short = Budget { time_ms: 1, ..ample() };
    let map = asked(world, Side::A, NAME, short).unwrap();
    assert_eq!(map.summary().end, End::Time, "{}", map.summary());
    assert_true(world, Side::A, &map);
    let idle = Budget { cpu_percent: 5, ..ample() };
    let map = asked(world, Side::A, NAME, idle).unwrap();
    let summary = map.summary();
    assert!(summary.cpu_ms * 10 <= summary.elapsed_ms, "{summary}");
    assert_true(world, Side::A, &map);
}

/// Work for which a CPU has to be idle would find a small part in its time. What doesn't answer is not
/// said to be missing.
#[test]
fn of_a_guest_whose_cpu_is_busy_is_reported_too() {
    let world = World::new(Link::one(1000));
    let mut spec = with_files(&world);
    spec.orders.compute_cpu = 1;
    let guest = world.boot(&spec);
    let cached = cached_pages(&guest);
    wait_helper(&world, Side::A, NAME);
    let map = complete(&world, Side::A);
    println!("{cached} pages; {}", map.summary());
    assert_told(&world, Side::A, &map, cached);
    guest.ask("helper-lie silent").unwrap();
    match helper(&world, Side::A) {
        GuestHelper::Silent { why } => assert!(why.contains("its guest is busy"), "{why}"),
        other => panic!("{other:?}"),
    }
    world.assert_intact(&guest);
}

fn helper(world: &World, side: Side) -> GuestHelper {
    world.shown(side, NAME).helper.unwrap()
}

// On a busy machine the helper, which gives way to others in its guest, gets little CPU time.
const FROM_DISKS: [&str; 5] = ["--shared-disks", "--storage", "on", "--helper-budget", "time=60s"];

/// Pages on its disks need not cross the network, and arrive as they were. The helper moves with its
/// guest, and answers at the destination, at a port that the guest's command line doesn't have.
#[runs(fills, promised)]
#[test]
fn comes_from_its_disks() {
    let world = World::new(Link::one(150));
    let mut spec = with_files(&world);
    spec.kernel_words = "init_on_alloc=0";
    let guest = world.boot(&spec);
    let cached = cached_pages(&guest);
    wait_helper(&world, Side::A, NAME);
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let answers = GuestHelper::Answers { version, clears_memory: Some(false) };
    assert_eq!(helper(&world, Side::A), answers);
    refuses_a_second_one(&world);
    let report = world.migrate(&guest, Side::A, &["--shared-disks", "--storage", "off"]);
    assert_eq!((report.stored_bytes, report.storage_read_bytes), (0, 0), "it is off");
    assert_eq!(helper(&world, Side::B), answers);
    let moved = world.migrate(&guest, Side::B, &["--shared-disks"]);
    let pages = moved.stored_bytes / 4096;
    println!("{pages} of {cached} pages from disks; {} bytes on the wire", moved.wire_bytes);
    // How many depends on the speed of the network and the disks.
    assert!(pages > 0, "{:?}", moved.notes);
    // What is read once may be placed twice: pages that the guest has freed hold copies.
    assert!(moved.stored_bytes <= moved.named_bytes && moved.storage_read_bytes > 0, "{moved:?}");
    assert!(moved.notes.iter().all(|note| !note.contains("helper")), "{:?}", moved.notes);
    assert_told(&world, Side::A, &complete(&world, Side::A), cached);
    disks_fail(&world, &guest, cached);
}

/// So do those of disks at a virtio-scsi controller: of a volume in two parts, and of a partition.
#[runs(fills)]
#[test]
fn comes_from_volumes_and_disks_on_scsi() {
    let world = World::new(Link::one(150));
    let guest = world.boot(&with_files_on_scsi(&world));
    let cached = cached_pages(&guest);
    wait_helper(&world, Side::A, NAME);
    let map = complete(&world, Side::A);
    println!("{cached} pages; {}", map.summary());
    assert_told(&world, Side::A, &map, cached);
    for device in map.devices() {
        // The kernel may find them in any order.
        let target = SERIALS.iter().position(|serial| *serial == device.serial).unwrap();
        assert!(device.address.ends_with(&format!("/0:{target}:0")), "{device:?}");
    }
    let report = world.migrate(&guest, Side::A, &FROM_DISKS);
    println!("{} bytes from disks: {:?}", report.stored_bytes, report.notes);
    // How many depends on the speed of the network and the disks.
    assert!(report.stored_bytes > 0, "{:?}", report.notes);
    assert!(report.notes.iter().all(|note| !note.contains("is not read")), "{:?}", report.notes);
    assert_told(&world, Side::B, &complete(&world, Side::B), cached);
    assert_cached_files(&guest);
}

/// And those of btrfs, whose addresses are not its disk's.
#[runs(fills)]
#[test]
fn comes_from_btrfs() {
    let world = World::new(Link::one(150));
    let guest = world.boot(&with_files_on_btrfs(&world));
    let cached = cached_pages(&guest);
    wait_helper(&world, Side::A, NAME);
    let map = complete(&world, Side::A);
    println!("{cached} pages; {}", map.summary());
    assert_true(&world, Side::A, &map);
    // The smallest files are within the metadata.
    assert!(map.pages() * 100 >= cached * 90, "{} of {cached}: {}", map.pages(), map.summary());
    let report = world.migrate(&guest, Side::A, &FROM_DISKS);
    println!("{} bytes from disks: {:?}", report.stored_bytes, report.notes);
    // How many depends on the speed of the network and the disks.
    assert!(report.stored_bytes > 0, "{:?}", report.notes);
    let checked = guest.check_files().unwrap();
    let pages = guest.spec.orders.files_bytes / 4096;
    assert!(checked.pages >= pages && checked.wrong == 0, "{checked:?}");
}

/// Copies an image, most of which are holes, into a new file or one that QEMU has open.
fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("--sparse=always").args([from, to]).status().unwrap();
    assert!(copied.success());
}

/// Some of its pages differ on disk, or can't be read there: all arrive as they were.
fn disks_fail(world: &World, guest: &Guest, cached: u64) {
    // The content of one disk is lost, and the other disk soon ends before its files do. The
    // guest's kernel would write there at some time, and give up a file system to which it can't
    // write.
    guest.ask("files-read-only").unwrap();
    let dir = tempfile::tempdir().unwrap();
    for serial in SERIALS {
        copy(&image(world, serial), &dir.path().join(serial));
    }
    let [zeroed, cut] =
        SERIALS.map(|serial| OpenOptions::new().write(true).open(image(world, serial)).unwrap());
    let bytes = zeroed.metadata().unwrap().len();
    zeroed.set_len(0).unwrap();
    zeroed.set_len(bytes).unwrap();
    let mut moving = world.begin(guest, Side::A, &FROM_DISKS);
    moving.wait_for(Phase::FirstPass);
    cut.set_len(cut.metadata().unwrap().len() / 8).unwrap();
    let report = world.arrive(guest, Side::A, moving);
    assert!(report.stored_bytes / 4096 * 10 < cached * 6, "{} bytes", report.stored_bytes);
    for serial in SERIALS {
        copy(&dir.path().join(serial), &image(world, serial));
    }
    assert_told(world, Side::B, &complete(world, Side::B), cached);
}

/// QEMU serves one client at a time, and a second one learns why it isn't served.
fn refuses_a_second_one(world: &World) {
    let first = guest_port::connect(&socket(world, Side::A, NAME)).unwrap();
    guest_port::greet(&first, Duration::from_secs(30)).unwrap();
    match helper(world, Side::A) {
        GuestHelper::Silent { why } => assert!(why.contains("one at a time"), "{why}"),
        other => panic!("{other:?}"),
    }
}

/// A port where nothing listens is an error after a while, and nothing else.
#[runs(fills)]
#[test]
fn of_a_guest_without_a_helper_is_not_reported() {
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", 0);
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    let is_said = |note: &String| note.starts_with("no page is read from storage: ");
    for (from, args, says) in [(Side::A, &["--storage", "on"][..], true), (Side::B, &[], false)] {
        let report = world.migrate(&guest, from, args);
        assert_eq!(report.stored_bytes, 0);
        assert_eq!(report.notes.iter().any(is_said), says, "{args:?}: {:?}", report.notes);
    }
    let stream = guest_port::connect(&socket(&world, Side::A, NAME)).unwrap();
    let patience = Patience { greeting: Duration::from_secs(1), all: Duration::from_secs(30) };
    let limits = guest_port::limits(end_to_end::files::RAM_BYTES);
    let error = guest_port::query(&stream, limits, ample(), patience).unwrap_err();
    assert!(matches!(error, GuestError::Absent { .. }), "{error}");
    drop(stream);
    match helper(&world, Side::A) {
        GuestHelper::Silent { why } => assert!(why.contains("no program"), "{why}"),
        other => panic!("{other:?}"),
    }
    world.assert_intact(&guest);
}

/// A false answer to a request.
type Lie = Box<dyn Fn(&Query) -> Vec<u8> + Send + Sync>;

fn run(page: u64, sector: u64, pages: u32, device: u16) -> Run {
    Run { page, sector, pages, device }
}

/// A well-formed answer, whatever the runs are.
fn sound(query: &Query, runs: &[Run]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut reply = Reply::new(query, "0.0.0", &mut bytes);
    reply.device(&Device { sectors: 1 << 20, ..Device::default() }, &mut bytes);
    for run in runs {
        reply.run(*run, &mut bytes);
    }
    reply.finish(Summary::default(), &mut bytes);
    bytes
}

/// Answers that only a compromised guest would give.
#[runs(fills)]
#[test]
fn of_a_liar_is_refused() {
    let ram_pages = end_to_end::files::RAM_BYTES / 4096;
    let endless: Vec<Run> = (0..ram_pages * 3).map(|nth| run(nth % ram_pages, 0, 1, 0)).collect();
    let lies: Vec<(&str, Lie)> = vec![
        ("memory", Box::new(move |query| sound(query, &[run(ram_pages - 1, 0, 2, 0)]))),
        ("disk", Box::new(move |query| sound(query, &[run(0, 1 << 20, 1, 0)]))),
        ("announce", Box::new(move |query| sound(query, &[run(0, 0, 1, 1)]))),
        ("more than", Box::new(move |query| sound(query, &endless))),
        ("without a greeting", Box::new(|_| vec![0xd7; 5 << 20])),
        (
            "damaged",
            Box::new(move |query| {
                let mut bytes = sound(query, &[run(0, 0, 1, 0)]);
                *bytes.last_mut().unwrap() ^= 1;
                bytes
            }),
        ),
        (
            "closed",
            Box::new(move |query| {
                let mut bytes = sound(query, &[run(0, 0, 1, 0)]);
                bytes.truncate(bytes.len() - 1);
                bytes
            }),
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("port");
    let listener = UnixListener::bind(&path).unwrap();
    let limits = guest_port::limits(end_to_end::files::RAM_BYTES);
    thread::scope(|scope| {
        let lies = &lies;
        scope.spawn(move || {
            for (_, lie) in lies {
                let (mut stream, _) = listener.accept().unwrap();
                let mut bytes = [0; Query::BYTES];
                stream.read_exact(&mut bytes).unwrap();
                let query = QueryFinder::default().take(&bytes).unwrap();
                // An agent that notices the lie reads no more.
                let _ = stream.write_all(&lie(&query));
            }
        });
        for (word, _) in lies {
            let stream = guest_port::connect(&path).unwrap();
            let long = Duration::from_secs(60);
            let patience = Patience { greeting: long, all: long };
            let error = guest_port::query(&stream, limits, ample(), patience).unwrap_err();
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
    });
}
