//! `/init` of a lab guest: fills memory as ordered, rewrites the working set,
//! and answers questions on the second serial port. In the guests of the field lab, which have a
//! whole Debian, it is a service that systemd starts, and does the same.
//!
//! Lines from the guest: `.HEX` every 5 ms or as ordered, a heartbeat with its number; `=HEX
//! WRITTEN DISK ANSWERS TOUCHED` every tenth time, with the pages written so far in memory, the
//! pages written to the disk or the file, the answers received, and the pages of cached files read
//! and written; `boot ID ORDERS` until the lab has sent a line, and on request; `ID ok ...` or `ID
//! error ...` for each line `ID COMMAND` that it receives. Heartbeats are judged by their arrival:
//! the guest's own clocks stand still while QEMU has stopped it, so no clock in the guest sees a
//! downtime.

mod answers;
mod helper;
mod liar;
mod system;
mod threads;
mod volume;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guest_pages::memory::Area;
use guest_pages::plan::Plans;
use lab_guest::PAGE_BYTES;
use lab_guest::burn::Burner;
use lab_guest::cache::{Layout, Load, Use};
use lab_guest::churn::{Churn, Churning};
use lab_guest::disk::{Disk, Habits};
use lab_guest::files::Files;
use lab_guest::memory;
use lab_guest::net;
use lab_guest::orders::{BadOrder, Orders};
use lab_guest::pace::Pacer;
use lab_guest::pair;
use lab_guest::storing::Storing;
use lab_guest::swing::Swing;
use lab_guest::writer::Writer;

use helper::Helper;

const DISK: &str = "/dev/vda";
/// The root of an initramfs is in memory.
const FILE: &str = "/file";
const SERVER: &str = "/server/memcached";
const LIBRARIES: &str = "/server";

/// State that the threads share.
struct Guest {
    boot_id: String,
    orders: Orders,
    port: Mutex<File>,
    /// Whether the lab has sent a line. Until then it may have missed the greeting: on a busy machine
    /// the guest may have booted before the lab listens.
    is_met: AtomicBool,
    began: Instant,
    fixed: [Area<'static>; 5],
    writer: Mutex<Writer<'static>>,
    pacer: Mutex<Pacer>,
    /// Pace of a writer that uses a whole CPU.
    burner: Option<Burner>,
    /// Whether another thread waits for the writer's memory: a writer that uses a whole CPU would
    /// lock it again before any other thread can.
    wanted: AtomicBool,
    swing: Mutex<Swing>,
    computed: AtomicU64,
    disk: Storing,
    file: Storing,
    /// Files on file systems, and so in the page cache.
    files: Mutex<Option<Files>>,
    churning: Churning,
    /// Load on cached files that the lab has made.
    load: Option<Load>,
    helper: Helper,
    written: AtomicU64,
    answers: AtomicU64,
    wrong_answers: AtomicU64,
    ticks: AtomicU64,
    worst_tick_us: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let ([lie, which], false) = (&words[..], std::process::id() == 1)
        && lie == "lie"
    {
        if let Err(error) = liar::run(which) {
            eprintln!("guest: the liar: {error}");
        }
        return;
    }
    if let Err(error) = run() {
        // On the console, whose end the lab shows when a guest stays silent.
        eprintln!("guest: {error}");
    }
    // An init that returns makes the kernel panic, which explains nothing.
    while std::process::id() == 1 {
        thread::park();
    }
}

fn run() -> std::io::Result<()> {
    if std::process::id() == 1 {
        system::mount("devtmpfs", "/dev")?;
        system::mount("proc", "/proc")?;
        system::load_modules()?;
    }
    let line = fs::read_to_string("/proc/cmdline")?;
    let bad = |error: BadOrder<'_>| std::io::Error::other(error.to_string());
    let orders = Orders::read(&line).map_err(bad)?;
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    system::wait_memory(orders.random_bytes + orders.text_bytes + orders.working_set_bytes)?;
    let port = system::open_port()?;
    let questions = BufReader::new(port.try_clone()?);
    memory::use_and_free(orders.freed_bytes);
    let guest = Arc::new(fill(orders, boot_id, port)?);
    let writing = Arc::clone(&guest);
    thread::Builder::new().name("writer".to_owned()).spawn(move || threads::write(&writing))?;
    let computing = Arc::clone(&guest);
    thread::Builder::new()
        .name("compute".to_owned())
        .spawn(move || threads::compute(&computing))?;
    for (path, store) in [(DISK, Guest::disk as fn(&Guest) -> &Storing), (FILE, Guest::file)] {
        let storing = Arc::clone(&guest);
        let run = move || {
            if let Err(error) = store(&storing).run() {
                eprintln!("guest: {path}: {error}");
            }
        };
        thread::Builder::new().name(path.to_owned()).spawn(run)?;
    }
    let churning = Arc::clone(&guest);
    thread::Builder::new().name("churn".to_owned()).spawn(move || churning.churning.run())?;
    let loading = Arc::clone(&guest);
    thread::Builder::new().name("load".to_owned()).spawn(move || threads::use_cache(&loading))?;
    if guest.orders.serve_bytes > 0 {
        serve(guest.orders.serve_bytes)?;
    }
    if guest.orders.address > 0 {
        talk(&guest)?;
    }
    guest.say(&guest.greeting());
    // After the greeting: beats are numbered from 1 again, and the lab takes a beat before the
    // greeting for one of a guest that has run twice.
    let ticking = Arc::clone(&guest);
    thread::Builder::new().name("tick".to_owned()).spawn(move || threads::tick(&ticking))?;
    for line in questions.lines() {
        let line = line?;
        guest.is_met.store(true, Ordering::Relaxed);
        if line.is_empty() {
            continue;
        }
        let (id, command) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match guest.answer(command.trim()) {
            Ok(text) => format!("{id} ok {text}"),
            Err(text) => format!("{id} error {text}"),
        };
        guest.say(&answer);
    }
    Ok(())
}

/// Starts the server that the lab has put into the initramfs.
fn serve(bytes: u64) -> std::io::Result<()> {
    net::up(net::ADDRESS)?;
    let mib = (bytes >> 20).to_string();
    let mut server = Command::new(SERVER);
    server.env("LD_LIBRARY_PATH", LIBRARIES);
    // One thread, no UDP.
    server.args(["-u", "root", "-t", "1", "-U", "0", "-l", "0.0.0.0", "-m", &mib]);
    // It ends with the guest.
    server.spawn().map(drop)
}

/// Answers and sends requests of guests, as ordered.
fn talk(guest: &Arc<Guest>) -> std::io::Result<()> {
    net::up(net::address(guest.orders.address))?;
    if guest.orders.answers {
        let answer = || {
            if let Err(error) = pair::answer() {
                eprintln!("guest: no answers: {error}");
            }
        };
        thread::Builder::new().name("answers".to_owned()).spawn(answer)?;
    }
    if guest.orders.asks > 0 {
        let asking = Arc::clone(guest);
        let ask = move || {
            pair::ask(net::address(asking.orders.asks), &asking.answers, &asking.wrong_answers);
        };
        thread::Builder::new().name("asks".to_owned()).spawn(ask)?;
    }
    Ok(())
}

fn fill(orders: Orders, boot_id: String, port: File) -> std::io::Result<Guest> {
    let Plans { fixed, working_set } = Plans::of(&orders);
    let fixed = fixed.map(|plan| memory::fill(plan, false));
    let mut writer = Writer::new(memory::fill(working_set, true), orders.order, orders.seed);
    // Calibrated while nothing else runs.
    let began = Instant::now();
    let write = |pages| writer.write(pages as usize);
    let burner = orders.burn.then(|| Burner::calibrate(write, || began.elapsed()));
    let swing = Swing::new(Duration::from_millis(orders.swing_ms), began.elapsed());
    let mut pacer = Pacer::with_step(Duration::from_millis(orders.write_step_ms));
    pacer.set_rate(orders.rate);
    let (disk, file) = stores(&orders)?;
    let files = (orders.files_bytes > 0).then(|| make_files(&orders)).transpose()?;
    let load = (orders.cache != Use::None).then(|| fill_cache(&orders)).transpose()?;
    let (files, churn) = files.unzip();
    let helper = Helper::default();
    if files.is_some() || load.is_some() {
        helper.start()?;
    }
    Ok(Guest {
        boot_id,
        orders,
        port: Mutex::new(port),
        is_met: AtomicBool::new(false),
        began,
        fixed,
        writer: Mutex::new(writer),
        pacer: Mutex::new(pacer),
        burner,
        wanted: AtomicBool::new(false),
        swing: Mutex::new(swing),
        computed: AtomicU64::new(0),
        disk,
        file,
        files: Mutex::new(files),
        churning: Churning::new(churn),
        load,
        helper,
        written: AtomicU64::new(0),
        answers: AtomicU64::new(0),
        wrong_answers: AtomicU64::new(0),
        ticks: AtomicU64::new(0),
        worst_tick_us: AtomicU64::new(0),
    })
}

/// The disk and the file, filled as ordered.
fn stores(orders: &Orders) -> std::io::Result<(Storing, Storing)> {
    let disk = (orders.disk_bytes > 0).then(|| {
        let habits = Habits::new(orders.disk_run, orders.disk_flush);
        Disk::fill(Path::new(DISK), orders.seed, orders.disk_bytes, habits)
    });
    let file = (orders.file_bytes > 0).then(|| {
        let habits = Habits::new(orders.disk_run, 0);
        // With the same seed, the disk's content would be the same.
        Disk::file(Path::new(FILE), !orders.seed, orders.file_bytes, habits)
    });
    let disk = Storing::new(disk.transpose()?, orders.disk_rate);
    Ok((disk, Storing::new(file.transpose()?, orders.file_rate)))
}

/// Mounts the disks, fills them, and reads all files, so that all are in the page cache and none is
/// dirty.
fn make_files(orders: &Orders) -> std::io::Result<(Files, Churn)> {
    system::mount("sysfs", "/sys")?;
    let places = system::mount_disks()?;
    // With the same seed, both would have the same content.
    let churn = Churn::make(&places, orders.churn_bytes, !orders.seed)?;
    let files = Files::make(places, orders.files_bytes, orders.seed)?;
    rustix::fs::sync();
    system::drop_caches(system::Caches::All)?;
    files.read()?;
    churn.check()?;
    Ok((files, churn))
}

/// Mounts the disk on which the lab has made files, and reads those in use.
fn fill_cache(orders: &Orders) -> std::io::Result<Load> {
    system::mount("sysfs", "/sys")?;
    let missing = || std::io::Error::other("there is no disk with files");
    let at = system::mount_disks()?.into_iter().next().ok_or_else(missing)?;
    let layout = Layout { kind: orders.cache, cached_bytes: orders.cache_bytes, seed: orders.seed };
    Load::new(layout, at, orders.cache_rate)
}

impl Guest {
    fn disk(&self) -> &Storing {
        &self.disk
    }

    fn file(&self) -> &Storing {
        &self.file
    }

    fn greeting(&self) -> String {
        format!("boot {} {}", self.boot_id, self.orders)
    }

    fn rests(&self) -> bool {
        self.orders.swing_ms > 0 && lock(&self.swing).rests(self.began.elapsed())
    }

    fn has_written_all(&self) -> bool {
        let most = self.orders.write_max_bytes / PAGE_BYTES as u64;
        most > 0 && self.written.load(Ordering::Relaxed) >= most
    }

    fn write_pages(&self, pages: usize) {
        let mut writer = lock(&self.writer);
        writer.write(pages);
        self.written.store(writer.written(), Ordering::Relaxed);
    }

    fn say(&self, line: &str) {
        // One write per line, so that lines of different threads never mix.
        if let Err(error) = lock(&self.port).write_all(format!("{line}\n").as_bytes()) {
            eprintln!("guest: {}: {error}", system::PORT);
        }
    }
}
