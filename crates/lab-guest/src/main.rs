//! `/init` of a lab guest: fills memory as ordered, rewrites the working set,
//! and answers questions on the second serial port.
//!
//! Lines from the guest: `.HEX` every 5 ms, a heartbeat with its number;
//! `=HEX WRITTEN DISK` every tenth time, with the pages written so far in memory
//! and on the disk; `boot ID ORDERS` at the start and when asked; `ID ok ...` or
//! `ID error ...` for each line `ID COMMAND` that it was sent. Heartbeats are
//! judged by when they arrive: the guest's own clocks stand still while QEMU has
//! stopped it, so no clock in here sees a blackout.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lab_guest::PAGE_BYTES;
use lab_guest::burn::{self, Burner};
use lab_guest::content::Kind;
use lab_guest::disk::{Disk, Habits};
use lab_guest::memory::{Area, Checked};
use lab_guest::net;
use lab_guest::orders::Orders;
use lab_guest::random::Random;
use lab_guest::swing::Swing;
use lab_guest::writer::{Pacer, Writer};

const TICK: Duration = Duration::from_millis(5);
const COUNT_EVERY_TICKS: u64 = 10;
/// How long a writer that is not to write waits before it looks again.
const REST: Duration = Duration::from_millis(1);
/// Rounds that count as one piece of work.
const COMPUTE_AT_ONCE: u32 = 10_000;
const PORT: &str = "/dev/ttyS1";
const DISK: &str = "/dev/vda";
const MODULES: &str = "/modules";
const SERVER: &str = "/server/memcached";
const LIBRARIES: &str = "/server";

/// All that the threads share.
struct Guest {
    boot_id: String,
    orders: Orders,
    port: Mutex<File>,
    fixed: Vec<Area>,
    writer: Mutex<Writer>,
    pacer: Mutex<Pacer>,
    /// How a writer keeps pace that uses all of a CPU.
    burner: Option<Burner>,
    /// Whether somebody waits for the writer's memory: one that uses all of a
    /// CPU would take it again before anybody else can.
    wanted: AtomicBool,
    swing: Mutex<Swing>,
    computed: AtomicU64,
    disk: Mutex<Option<Disk>>,
    disk_pacer: Mutex<Pacer>,
    written: AtomicU64,
    disk_written: AtomicU64,
    ticks: AtomicU64,
    worst_tick_us: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn main() {
    if let Err(error) = run() {
        // On the console: the lab shows its end when a guest stays silent.
        eprintln!("guest: {error}");
    }
    // An init that returns makes the kernel panic, which tells as little.
    loop {
        thread::park();
    }
}

fn run() -> std::io::Result<()> {
    mount("devtmpfs", "/dev")?;
    mount("proc", "/proc")?;
    load_modules()?;
    let line = fs::read_to_string("/proc/cmdline")?;
    let orders: Orders = line.parse().map_err(std::io::Error::other)?;
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    let port = open_port()?;
    let questions = BufReader::new(port.try_clone()?);
    let guest = Arc::new(fill(orders, boot_id, port)?);
    let writing = Arc::clone(&guest);
    thread::Builder::new().name("writer".to_owned()).spawn(move || write(&writing))?;
    let computing = Arc::clone(&guest);
    thread::Builder::new().name("compute".to_owned()).spawn(move || compute(&computing))?;
    let disk_writing = Arc::clone(&guest);
    thread::Builder::new().name("disk".to_owned()).spawn(move || write_disk(&disk_writing))?;
    if guest.orders.serve_bytes > 0 {
        serve(guest.orders.serve_bytes)?;
    }
    guest.say(&guest.greeting());
    // After it: beats are numbered from 1 again, and who hears one before the
    // greeting takes it for a beat of a guest that has run twice.
    let ticking = Arc::clone(&guest);
    thread::Builder::new().name("tick".to_owned()).spawn(move || tick(&ticking))?;
    for line in questions.lines() {
        let line = line?;
        let (id, command) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match guest.answer(command.trim()) {
            Ok(text) => format!("{id} ok {text}"),
            Err(text) => format!("{id} error {text}"),
        };
        guest.say(&answer);
    }
    Ok(())
}

fn mount(kind: &str, at: &str) -> std::io::Result<()> {
    fs::create_dir_all(at)?;
    rustix::mount::mount(kind, at, kind, rustix::mount::MountFlags::empty(), None)?;
    Ok(())
}

/// Drivers. Those that need others, in whatever order this kernel has it, are
/// tried again after them.
fn load_modules() -> std::io::Result<()> {
    let mut left: Vec<_> = fs::read_dir(MODULES)?.filter_map(|e| Some(e.ok()?.path())).collect();
    let mut before = usize::MAX;
    while left.len() < before {
        before = left.len();
        left.retain(|path| {
            let module = File::open(path);
            module.is_ok_and(|file| rustix::system::finit_module(file, c"", 0).is_err())
        });
    }
    for path in left {
        eprintln!("guest: the kernel does not take {}", path.display());
    }
    Ok(())
}

/// Starts the server that the lab has put here.
fn serve(bytes: u64) -> std::io::Result<()> {
    net::up()?;
    let mib = (bytes >> 20).to_string();
    let mut server = Command::new(SERVER);
    server.env("LD_LIBRARY_PATH", LIBRARIES);
    // One thread, no UDP.
    server.args(["-u", "root", "-t", "1", "-U", "0", "-l", "0.0.0.0", "-m", &mib]);
    // It ends with the guest.
    server.spawn().map(drop)
}

fn open_port() -> std::io::Result<File> {
    let port = OpenOptions::new().read(true).write(true).open(PORT)?;
    let mut settings = rustix::termios::tcgetattr(&port)?;
    settings.make_raw();
    settings.set_speed(115_200)?;
    rustix::termios::tcsetattr(&port, rustix::termios::OptionalActions::Now, &settings)?;
    Ok(port)
}

fn fill(orders: Orders, boot_id: String, port: File) -> std::io::Result<Guest> {
    let mut first_page = 0;
    let mut area = |name, kind, bytes, rewritten| {
        let area = Area::fill(name, kind, orders.seed, first_page, bytes, rewritten);
        first_page += bytes / PAGE_BYTES as u64;
        area
    };
    let fixed = vec![
        area("random", Kind::Random, orders.random_bytes, false),
        area("text", Kind::Text, orders.text_bytes, false),
        area("zero", Kind::Zero, orders.zero_bytes, false),
    ];
    let working_set = area("ws", Kind::Random, orders.working_set_bytes, true);
    let mut writer = Writer::new(working_set, orders.order, orders.seed);
    // While nothing else runs.
    let burner = orders.burn.then(|| Burner::calibrate(|pages| writer.write(pages as usize)));
    let swing = Swing::new(Duration::from_millis(orders.swing_ms), Instant::now());
    let mut pacer = Pacer::default();
    pacer.set_rate(orders.rate);
    let disk = match orders.disk_bytes {
        0 => None,
        bytes => {
            let habits = Habits::new(orders.disk_run, orders.disk_flush);
            Some(Disk::fill(Path::new(DISK), orders.seed, bytes, habits)?)
        }
    };
    let mut disk_pacer = Pacer::default();
    disk_pacer.set_rate(orders.disk_rate);
    Ok(Guest {
        boot_id,
        orders,
        port: Mutex::new(port),
        fixed,
        writer: Mutex::new(writer),
        pacer: Mutex::new(pacer),
        burner,
        wanted: AtomicBool::new(false),
        swing: Mutex::new(swing),
        computed: AtomicU64::new(0),
        disk: Mutex::new(disk),
        disk_pacer: Mutex::new(disk_pacer),
        written: AtomicU64::new(0),
        disk_written: AtomicU64::new(0),
        ticks: AtomicU64::new(0),
        worst_tick_us: AtomicU64::new(0),
    })
}

/// Beats, before anything else that wants the CPU.
fn tick(guest: &Guest) {
    if let Err(error) = rustix::process::setpriority_process(None, -20) {
        eprintln!("guest: no priority for heartbeats: {error}");
    }
    let mut last = Instant::now();
    loop {
        thread::sleep(TICK.saturating_sub(last.elapsed()));
        let now = Instant::now();
        let gap = now - last;
        last = now;
        let gap_us = u64::try_from(gap.as_micros()).unwrap_or(u64::MAX);
        guest.worst_tick_us.fetch_max(gap_us, Ordering::Relaxed);
        let ticks = guest.ticks.fetch_add(1, Ordering::Relaxed) + 1;
        if ticks.is_multiple_of(COUNT_EVERY_TICKS) {
            let written = guest.written.load(Ordering::Relaxed);
            let disk_written = guest.disk_written.load(Ordering::Relaxed);
            guest.say(&format!("={ticks:x} {written} {disk_written}"));
        } else {
            guest.say(&format!(".{ticks:x}"));
        }
    }
}

/// Keeps the calling thread to a CPU, counted from 1; 0 for any.
fn keep_to(cpu: u64) {
    let Some(cpu) = usize::try_from(cpu).ok().and_then(|cpu| cpu.checked_sub(1)) else { return };
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(cpu);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &cpus) {
        eprintln!("guest: there is no CPU {}: {error}", cpu + 1);
    }
}

fn write(guest: &Guest) {
    keep_to(guest.orders.writer_cpu);
    match &guest.burner {
        Some(burner) => write_burning(guest, burner.clone()),
        None => write_at_leisure(guest),
    }
}

/// Writes and computes, and never sleeps unless it rests.
fn write_burning(guest: &Guest, mut burner: Burner) {
    let mut random = Random::new(guest.orders.seed, 1);
    loop {
        let rate = lock(&guest.pacer).rate();
        if rate == 0 || guest.rests() || guest.wanted.load(Ordering::Relaxed) {
            thread::sleep(REST);
            continue;
        }
        let chunk = burner.chunk(rate);
        guest.write_pages(chunk.pages as usize);
        burn::compute(&mut random, chunk.rounds);
    }
}

/// Keeps a CPU busy, and writes nothing.
fn compute(guest: &Guest) {
    if guest.orders.compute_cpu == 0 {
        return;
    }
    keep_to(guest.orders.compute_cpu);
    let mut random = Random::new(guest.orders.seed, 2);
    loop {
        burn::compute(&mut random, COMPUTE_AT_ONCE);
        guest.computed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes what is due, and sleeps.
fn write_at_leisure(guest: &Guest) {
    let mut last = Instant::now();
    loop {
        let step = lock(&guest.pacer).step();
        thread::sleep(step);
        let now = Instant::now();
        let pages = lock(&guest.pacer).pages_due(now - last);
        last = now;
        if pages > 0 && !guest.rests() {
            guest.write_pages(pages);
        }
    }
}

fn write_disk(guest: &Guest) {
    let mut last = Instant::now();
    loop {
        let step = lock(&guest.disk_pacer).step();
        thread::sleep(step);
        let now = Instant::now();
        let pages = lock(&guest.disk_pacer).pages_due(now - last);
        last = now;
        let mut disk = lock(&guest.disk);
        let Some(disk) = disk.as_mut() else { return };
        if let Err(error) = disk.write(pages) {
            // It holds what a check will find wrong.
            eprintln!("guest: {DISK}: {error}");
            return;
        }
        guest.disk_written.store(disk.written(), Ordering::Relaxed);
    }
}

impl Guest {
    fn greeting(&self) -> String {
        format!("boot {} {}", self.boot_id, self.orders)
    }

    fn rests(&self) -> bool {
        self.orders.swing_ms > 0 && lock(&self.swing).rests(Instant::now())
    }

    fn write_pages(&self, pages: usize) {
        let mut writer = lock(&self.writer);
        writer.write(pages);
        self.written.store(writer.written(), Ordering::Relaxed);
    }

    fn say(&self, line: &str) {
        // One write for a line: lines of different threads never mix.
        if let Err(error) = lock(&self.port).write_all(format!("{line}\n").as_bytes()) {
            eprintln!("guest: {PORT}: {error}");
        }
    }

    fn answer(&self, command: &str) -> Result<String, String> {
        let (verb, rest) = command.split_once(' ').unwrap_or((command, ""));
        match verb {
            "hello" => Ok(self.greeting()),
            "check" => Ok(self.check()),
            "check-disk" => self.check_disk(),
            "status" => Ok(self.status()),
            "forget" => {
                self.worst_tick_us.store(0, Ordering::Relaxed);
                Ok(String::new())
            }
            "pause" => self.set_rate(0),
            "resume" => self.set_rate(self.orders.rate),
            "rate" => {
                let rate = rest.parse().map_err(|_| format!("{rest:?} is no rate"))?;
                self.set_rate(rate)
            }
            "burst" => {
                lock(&self.swing).restart(Instant::now());
                Ok(String::new())
            }
            "reboot" => end(rustix::system::RebootCommand::Restart),
            "poweroff" => end(rustix::system::RebootCommand::PowerOff),
            _ => Err(format!("unknown command {verb:?}")),
        }
    }

    fn set_rate(&self, rate: u64) -> Result<String, String> {
        lock(&self.pacer).set_rate(rate);
        Ok(format!("rate={rate}"))
    }

    fn check(&self) -> String {
        let mut checked = Checked::default();
        for area in &self.fixed {
            checked.add(area.check());
        }
        self.wanted.store(true, Ordering::Relaxed);
        let writer = lock(&self.writer);
        self.wanted.store(false, Ordering::Relaxed);
        checked.add(writer.area().check());
        let (wrong, first_wrong) = writer.wrong();
        let first_wrong = first_wrong.map(str::to_owned);
        checked.add(Checked { pages: 0, wrong, first_wrong });
        shown(checked)
    }

    fn check_disk(&self) -> Result<String, String> {
        let mut disk = lock(&self.disk);
        let disk = disk.as_mut().ok_or("there is no disk")?;
        let checked = disk.check().map_err(|error| format!("{DISK}: {error}"))?;
        Ok(format!("written={} {}", disk.written(), shown(checked)))
    }

    fn status(&self) -> String {
        format!(
            "ticks={} written={} rate={} worst_tick_us={} computed={} fastest={}",
            self.ticks.load(Ordering::Relaxed),
            self.written.load(Ordering::Relaxed),
            lock(&self.pacer).rate(),
            self.worst_tick_us.load(Ordering::Relaxed),
            self.computed.load(Ordering::Relaxed),
            self.burner.as_ref().map_or(0, Burner::fastest),
        )
    }
}

fn shown(checked: Checked) -> String {
    let first = checked.first_wrong.unwrap_or_else(|| "none".to_owned());
    format!("pages={} wrong={} first={first}", checked.pages, checked.wrong)
}

fn end(command: rustix::system::RebootCommand) -> Result<String, String> {
    match rustix::system::reboot(command) {
        Ok(()) => Ok(String::new()),
        Err(error) => Err(error.to_string()),
    }
}
