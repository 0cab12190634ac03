//! One run: one contender moves one guest, whose disk is on a storage host.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use lab_guest::cache::Use;

use super::figures::{CacheFigures, Course};
use super::files::Files;
use super::scenarios::{CacheScenario, Contestant, Links, San};
use crate::contender::{Ground, Moved};
use crate::contest::save;
use crate::cpu::{self, CpuMeter};
use crate::machine::CpuTime;
use crate::result::Run;
use crate::warm;
use lab::error::{LabError, Result};
use lab::guest::Guest;
use lab::hosts::{Hosts, NfsServer, Storage};
use lab::setup::{self, Kit};

/// Memory to warm for the arriving guest and for buffers of the transfer.
const WARM_BYTES: u64 = 2 << 30;
/// Time for a booted guest to settle and its helper to get ready.
const SETTLE: Duration = Duration::from_secs(3);
/// How long the guest is watched before it moves.
const BEFORE: Duration = Duration::from_secs(3);
/// How long the guest is watched afterwards; if [`CacheScenario::watched`], long enough to read all
/// its files again.
const AFTER: Duration = Duration::from_secs(1);
const AFTER_LONG: Duration = Duration::from_secs(12);
/// Longest time until a moved guest reports again.
const HEARD_MAX: Duration = Duration::from_secs(20);
/// Pages that the guest read and wrote are reported within this time.
const COUNTED: Duration = Duration::from_millis(300);
/// How often it is checked whether half of the guest has moved.
const LOOK: Duration = Duration::from_millis(50);
/// One file page in so many is checked on disk: to read all takes long.
const ON_DISK_ONE_OF: usize = 4;
/// Rate of the storage link where nothing is measured.
const FAST_MBIT: u32 = 10_000;

/// New hosts, a new disk, a new guest, one move.
pub(super) fn run(
    kit: &Kit,
    scenario: &CacheScenario,
    links: Links,
    files: &Files,
    label: &str,
    contestant: &mut Contestant,
) -> Result<Run> {
    let hosts = Hosts::new(links.network())?;
    let storage = Storage::join(&hosts)?;
    let (_server, disk) = serve(kit, links, &storage, files)?;
    let mut spec = scenario.guest();
    spec.initrd = Some(setup::helper_initrd(kit)?);
    spec.extra.extend(disk);
    let (downtime_goal, timeout) = (scenario.goal(), scenario.timeout());
    let ground = Ground { kit, hosts: &hosts, disk: None, downtime_goal, timeout, from: None };
    let guest = contestant.contender.start(&ground, &spec)?;
    storage.shape(links.san_mbit())?;
    thread::sleep(SETTLE);
    guest.expect_on(&hosts.b)?;
    warm::memory(WARM_BYTES);
    let restorable_bytes = restorable(&guest)?;
    let cpu = CpuMeter::start(&[&hosts.a, &hosts.b], Vec::new(), cpu::OFTEN)?;
    guest.forget_gap();
    thread::sleep(COUNTED);
    let alone = Instant::now();
    thread::sleep(BEFORE);
    let (network, san) = (hosts.traffic()?, storage.crossed_at_b()?);
    let (began, busy) = (Instant::now(), CpuTime::now()?.busy_s);
    let moved = move_it(scenario, links, &ground, &storage, contestant, &guest);
    if let Some(report) = contestant.contender.report() {
        save(&format!("{label}-{}-report", contestant.name()), report)?;
    }
    let moved = moved?;
    let cores_busy = (CpuTime::now()?.busy_s - busy) / began.elapsed().as_secs_f64();
    let cache = CacheFigures {
        san_bytes: storage.crossed_at_b()?.saturating_sub(san),
        restorable_bytes,
        cores_busy,
        ..reported(contestant)
    };
    guest.wait_beat(HEARD_MAX)?;
    let spent = cpu.since(moved.began);
    let run = Run {
        ok: true,
        total_s: (moved.ran - moved.began).as_secs_f64(),
        prepare_s: moved.prepare.as_secs_f64(),
        downtime_ms: moved.downtime.as_secs_f64() * 1e3,
        guest_gap_ms: guest.felt(moved.began, moved.ran).gap.as_secs_f64() * 1e3,
        wire_bytes: (hosts.traffic()? - network).bytes,
        cpu_s: spent.processes_s,
        stolen_s: spent.stolen_s,
        cache: Some(cache),
        ..Run::default()
    };
    let from = if contestant.drops { began } else { moved.began };
    let run = watch(run, scenario, &guest, alone, from, &moved);
    storage.shape(FAST_MBIT)?;
    let run = check(run, scenario, &guest)?;
    contestant.contender.stop();
    Ok(run)
}

/// Serves a copy of the image, by NBD or NFS; returns QEMU's arguments for the disk, too.
fn serve(
    kit: &Kit,
    links: Links,
    storage: &Storage,
    files: &Files,
) -> Result<(Option<NfsServer>, Vec<String>)> {
    let image = files.image();
    if links.san != San::Nfs {
        storage.serve(&image, links.requests_per_s())?;
        return Ok((None, Storage::arguments()));
    }
    let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let server = storage.serve_nfs(&setup::nfs(kit)?, &[image])?;
    Ok((Some(server), Storage::nfs_arguments(&name)))
}

/// Moves the guest, which drops its page cache first if the contestant wants that. Slows the
/// storage half-way if the links say so.
fn move_it(
    scenario: &CacheScenario,
    links: Links,
    ground: &Ground<'_>,
    storage: &Storage,
    contestant: &mut Contestant,
    guest: &Guest,
) -> Result<Moved> {
    if contestant.drops {
        guest.ask("cache-drop")?;
    }
    let Some(slowed_mbit) = links.slowed_mbit() else {
        return contestant.contender.migrate(ground);
    };
    let half = scenario.content_bytes() / 2;
    thread::scope(|scope| {
        let (over, is_over) = mpsc::channel::<()>();
        let slowing = scope.spawn(move || {
            if half_way(ground.hosts, storage, half, &is_over)? {
                storage.shape(slowed_mbit)?;
            }
            Ok(())
        });
        let moved = contestant.contender.migrate(ground);
        drop(over);
        let slowed: Result<()> = slowing.join().unwrap_or_else(|_| {
            Err(LabError::Missing { what: "who slows the storage".to_owned() })
        });
        slowed.and(moved)
    })
}

/// Waits until so many bytes have crossed both links; false if the move ended before.
fn half_way(hosts: &Hosts, storage: &Storage, bytes: u64, over: &Receiver<()>) -> Result<bool> {
    let crossed = || Ok(hosts.a.sent()?.bytes + storage.crossed_at_b()?);
    let before = crossed()?;
    loop {
        if over.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout) {
            return Ok(false);
        }
        if crossed()? - before >= bytes {
            return Ok(true);
        }
    }
}

/// Page cache that the guest could drop and read again from its disk.
fn restorable(guest: &Guest) -> Result<u64> {
    let answer = guest.ask("memory")?;
    let kib = |name: &str| {
        let words = answer.split(' ');
        let word = words.filter_map(|word| word.split_once('=')).find(|(key, _)| *key == name);
        word.and_then(|(_, number)| number.parse::<u64>().ok())
    };
    match (kib("active"), kib("inactive"), kib("dirty")) {
        (Some(active), Some(inactive), Some(dirty)) => {
            Ok((active + inactive).saturating_sub(dirty) << 10)
        }
        _ => Err(LabError::Guest { command: "memory".to_owned(), answer }),
    }
}

/// The report's figures of storage.
fn reported(contestant: &Contestant) -> CacheFigures {
    let Some(report) = contestant.contender.report() else { return CacheFigures::default() };
    CacheFigures {
        restored_bytes: Some(report.stored_bytes),
        storage_read_bytes: Some(report.storage_read_bytes),
        notes: report.notes.clone(),
        ..CacheFigures::default()
    }
}

/// Adds how much the guest read and wrote.
fn watch(
    mut run: Run,
    scenario: &CacheScenario,
    guest: &Guest,
    alone: Instant,
    began: Instant,
    moved: &Moved,
) -> Run {
    let end = moved.ran + if scenario.watched { AFTER_LONG } else { AFTER };
    thread::sleep((end + COUNTED).saturating_duration_since(Instant::now()));
    let counts = guest.touched(alone, end + COUNTED);
    let course = Course { counts, alone, began, ran: moved.ran, end };
    run.guest_work = course.meanwhile_per_s() / course.before_per_s().max(1.0);
    if let Some(cache) = &mut run.cache {
        cache.touched_before_per_s = course.before_per_s();
        cache.touched_per_s = course.meanwhile_per_s();
        cache.pages_lost = course.pages_lost();
        if scenario.watched {
            cache.back_to_full_s = course.back_to_full_s();
            cache.course = course.pieces();
        }
    }
    run
}

/// Has the guest check its memory and all its files as they are in its page cache; where it wrote
/// to them, also some as they are on disk.
fn check(mut run: Run, scenario: &CacheScenario, guest: &Guest) -> Result<Run> {
    let memory = guest.check()?;
    let mut cached = guest.check_cache(1)?;
    if matches!(scenario.kind, Use::Mail | Use::Database) {
        guest.ask("files-sync")?;
        guest.ask("cache-drop")?;
        let on_disk = guest.check_cache(ON_DISK_ONE_OF)?;
        cached.pages += on_disk.pages;
        cached.wrong += on_disk.wrong;
    }
    let once = guest.pulse().twice == 0;
    run.intact = memory.wrong == 0 && memory.pages > 0 && cached.wrong == 0 && once;
    if let Some(figures) = &mut run.cache {
        (figures.file_pages, figures.file_pages_wrong) = (cached.pages, cached.wrong);
    }
    Ok(run)
}
