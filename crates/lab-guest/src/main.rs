//! `/init` of a lab guest: fills memory as ordered, rewrites the working set,
//! and answers questions on the second serial port.
//!
//! Lines from the guest: `.HEX` every 5 ms or as ordered, a heartbeat with its number;
//! `=HEX WRITTEN DISK ANSWERS TOUCHED` every tenth time, with the pages written so far in
//! memory, and on the disk or in the file, the answers that it got, and the pages of
//! cached files that were read and written; `boot ID ORDERS` at the start and when asked;
//! `ID ok ...` or `ID error ...` for each line `ID COMMAND` that it was sent.
//! Heartbeats are judged by when they arrive: the guest's own clocks stand still
//! while QEMU has stopped it, so no clock in here sees a blackout.

mod helper;
mod liar;
mod system;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lab_guest::PAGE_BYTES;
use lab_guest::burn::{self, Burner};
use lab_guest::cache::{Layout, Load, Use};
use lab_guest::churn::{Churn, Churning};
use lab_guest::content::Kind;
use lab_guest::disk::{Disk, Habits};
use lab_guest::files::{Files, Way};
use lab_guest::memory::{Area, Checked};
use lab_guest::net;
use lab_guest::orders::Orders;
use lab_guest::pair;
use lab_guest::random::Random;
use lab_guest::storing::Storing;
use lab_guest::swing::Swing;
use lab_guest::writer::{Pacer, Writer};

use helper::Helper;

const COUNT_EVERY_TICKS: u64 = 10;
/// How long a writer that is not to write waits before it looks again.
const REST: Duration = Duration::from_millis(1);
/// Rounds that count as one piece of work.
const COMPUTE_AT_ONCE: u32 = 10_000;
const DISK: &str = "/dev/vda";
/// The root of an initramfs is in memory.
const FILE: &str = "/file";
/// Content that guests have in common is numbered apart from what else each has.
const COMMON_FIRST_PAGE: u64 = 1 << 31;
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
    disk: Storing,
    file: Storing,
    /// On file systems, and so in the page cache.
    files: Mutex<Option<Files>>,
    churning: Churning,
    /// The same for files that the lab has made.
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
        // On the console: the lab shows its end when a guest stays silent.
        eprintln!("guest: {error}");
    }
    // An init that returns makes the kernel panic, which tells as little.
    loop {
        thread::park();
    }
}

fn run() -> std::io::Result<()> {
    system::mount("devtmpfs", "/dev")?;
    system::mount("proc", "/proc")?;
    system::load_modules()?;
    let line = fs::read_to_string("/proc/cmdline")?;
    let orders: Orders = line.parse().map_err(std::io::Error::other)?;
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    let port = system::open_port()?;
    let questions = BufReader::new(port.try_clone()?);
    let guest = Arc::new(fill(orders, boot_id, port)?);
    let writing = Arc::clone(&guest);
    thread::Builder::new().name("writer".to_owned()).spawn(move || write(&writing))?;
    let computing = Arc::clone(&guest);
    thread::Builder::new().name("compute".to_owned()).spawn(move || compute(&computing))?;
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
    thread::Builder::new().name("load".to_owned()).spawn(move || use_cache(&loading))?;
    if guest.orders.serve_bytes > 0 {
        serve(guest.orders.serve_bytes)?;
    }
    if guest.orders.address > 0 {
        talk(&guest)?;
    }
    guest.say(&guest.greeting());
    // After it: beats are numbered from 1 again, and who hears one before the
    // greeting takes it for a beat of a guest that has run twice.
    let ticking = Arc::clone(&guest);
    thread::Builder::new().name("tick".to_owned()).spawn(move || tick(&ticking))?;
    for line in questions.lines() {
        let line = line?;
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

/// Starts the server that the lab has put here.
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

/// Answers and asks other guests, as ordered.
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
    let mut first_page = 0;
    let mut area = |name, kind, bytes, rewritten| {
        let area = Area::fill(name, kind, orders.seed, first_page, bytes, rewritten);
        first_page += bytes / PAGE_BYTES as u64;
        area
    };
    let mut next_common = COMMON_FIRST_PAGE;
    let mut common = |name, kind, bytes| {
        let area = Area::fill(name, kind, orders.common_seed, next_common, bytes, false);
        next_common += bytes / PAGE_BYTES as u64;
        area
    };
    let fixed = vec![
        common("common", Kind::Random, orders.common_bytes),
        common("common_text", Kind::Text, orders.common_text_bytes),
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
        // Of the same seed, a disk's content would be the same.
        Disk::file(Path::new(FILE), !orders.seed, orders.file_bytes, habits)
    });
    let disk = Storing::new(disk.transpose()?, orders.disk_rate);
    Ok((disk, Storing::new(file.transpose()?, orders.file_rate)))
}

/// Mounts the disks, fills them, and reads what is there, so that all of it is in
/// the page cache and nothing of it newer there.
fn make_files(orders: &Orders) -> std::io::Result<(Files, Churn)> {
    system::mount("sysfs", "/sys")?;
    let places = system::mount_disks()?;
    // Of the same seed, the content of both would be the same.
    let churn = Churn::make(&places, orders.churn_bytes, !orders.seed)?;
    let files = Files::make(places, orders.files_bytes, orders.seed)?;
    rustix::fs::sync();
    system::drop_caches(system::Caches::All)?;
    files.read()?;
    churn.check()?;
    Ok((files, churn))
}

/// Mounts the disk that the lab has made files on, and reads what is in use of them.
fn fill_cache(orders: &Orders) -> std::io::Result<Load> {
    system::mount("sysfs", "/sys")?;
    let missing = || std::io::Error::other("there is no disk with files");
    let at = system::mount_disks()?.into_iter().next().ok_or_else(missing)?;
    let layout = Layout { kind: orders.cache, cached_bytes: orders.cache_bytes, seed: orders.seed };
    Load::new(layout, at, orders.cache_rate)
}

fn use_cache(guest: &Guest) {
    if let Some(load) = guest.load.as_ref().filter(|_| guest.orders.cache_rate > 0)
        && let Err(error) = load.run()
    {
        eprintln!("guest: cached files: {error}");
    }
}

/// Beats, before anything else that wants the CPU.
fn tick(guest: &Guest) {
    if let Err(error) = rustix::process::setpriority_process(None, -20) {
        eprintln!("guest: no priority for heartbeats: {error}");
    }
    let mut last = Instant::now();
    let period = guest.orders.tick();
    loop {
        thread::sleep(period.saturating_sub(last.elapsed()));
        let now = Instant::now();
        let gap = now - last;
        last = now;
        let gap_us = u64::try_from(gap.as_micros()).unwrap_or(u64::MAX);
        guest.worst_tick_us.fetch_max(gap_us, Ordering::Relaxed);
        let ticks = guest.ticks.fetch_add(1, Ordering::Relaxed) + 1;
        if ticks.is_multiple_of(COUNT_EVERY_TICKS) {
            let written = guest.written.load(Ordering::Relaxed);
            let disk_written = guest.disk.written() + guest.file.written();
            let answers = guest.answers.load(Ordering::Relaxed);
            let touched = guest.load.as_ref().map_or(0, Load::touched);
            guest.say(&format!("={ticks:x} {written} {disk_written} {answers} {touched}"));
        } else {
            guest.say(&format!(".{ticks:x}"));
        }
    }
}

fn write(guest: &Guest) {
    system::keep_to(guest.orders.writer_cpu);
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
    system::keep_to(guest.orders.compute_cpu);
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
        if pages > 0 && !guest.rests() && !guest.has_written_all() {
            guest.write_pages(pages);
        }
    }
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
        self.orders.swing_ms > 0 && lock(&self.swing).rests(Instant::now())
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
        // One write for a line: lines of different threads never mix.
        if let Err(error) = lock(&self.port).write_all(format!("{line}\n").as_bytes()) {
            eprintln!("guest: {}: {error}", system::PORT);
        }
    }

    fn answer(&self, command: &str) -> Result<String, String> {
        let (verb, rest) = command.split_once(' ').unwrap_or((command, ""));
        match verb {
            "hello" => Ok(self.greeting()),
            "check" => self.check(),
            "check-disk" => self.check_disk(),
            "files" => self.on_files(|files| files.read()),
            "files-change" => self.change_files(rest, Way::Cache),
            "files-direct" => self.change_files(rest, Way::Direct),
            "files-check" => self.check_files(),
            "churn" => {
                self.churning.set(rest == "on");
                self.churning.done()
            }
            "files-sync" => {
                rustix::fs::sync();
                Ok(String::new())
            }
            "files-drop" => dropped(system::Caches::All),
            "cache-check" => {
                let one_of = rest.parse().map_err(|_| format!("{rest:?} is no number"))?;
                self.check_cache(one_of)
            }
            "cache-drop" => dropped(system::Caches::Contents),
            "files-forget-names" => dropped(system::Caches::Names),
            "helper" => self.helper.woken().map_err(|error| error.to_string()),
            "helper-works" => {
                self.helper.works().map(|it| it.to_string()).map_err(|error| error.to_string())
            }
            "helper-kill" => done(self.helper.end()),
            "helper-start" => done(self.helper.start()),
            "helper-lie" => done(self.helper.lie(rest)),
            "helper-asked" => done(self.helper.hear("asked")),
            "helper-told" => done(self.helper.hear("told")),
            "helper-go" => done(self.helper.go()),
            "memory" => system::memory().map_err(|error| error.to_string()),
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
            "reboot" => system::end(rustix::system::RebootCommand::Restart),
            "poweroff" => system::end(rustix::system::RebootCommand::PowerOff),
            _ => Err(format!("unknown command {verb:?}")),
        }
    }

    fn set_rate(&self, rate: u64) -> Result<String, String> {
        lock(&self.pacer).set_rate(rate);
        Ok(format!("rate={rate}"))
    }

    fn check(&self) -> Result<String, String> {
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
        let file = self.file.check().map_err(|error| format!("{FILE}: {error}"))?;
        checked.add(file.unwrap_or_default());
        Ok(shown(checked))
    }

    fn check_disk(&self) -> Result<String, String> {
        let checked = self.disk.check().map_err(|error| format!("{DISK}: {error}"))?;
        let checked = checked.ok_or("there is no disk")?;
        Ok(format!("written={} {}", self.disk.written(), shown(checked)))
    }

    fn check_cache(&self, one_of: usize) -> Result<String, String> {
        let load = self.load.as_ref().ok_or("there are no cached files")?;
        load.check(one_of).map(shown).map_err(|error| error.to_string())
    }

    fn on_files(
        &self,
        work: impl FnOnce(&mut Files) -> std::io::Result<u64>,
    ) -> Result<String, String> {
        let mut files = lock(&self.files);
        let files = files.as_mut().ok_or("there are no files")?;
        work(files).map(|pages| format!("pages={pages}")).map_err(|error| error.to_string())
    }

    /// `PAGES`, or `FIRST PAGES`.
    fn change_files(&self, rest: &str, way: Way) -> Result<String, String> {
        let (first, pages) = rest.split_once(' ').unwrap_or(("0", rest));
        let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is no number"));
        let (first, pages) = (number(first)?, number(pages)?);
        self.on_files(|files| files.change(first, pages, way))
    }

    /// Of all files on disks, those that change too, as they are read.
    fn check_files(&self) -> Result<String, String> {
        let files = lock(&self.files);
        let files = files.as_ref().ok_or("there are no files")?;
        let mut checked = files.check().map_err(|error| error.to_string())?;
        checked.add(self.churning.check()?);
        Ok(shown(checked))
    }

    fn status(&self) -> String {
        format!(
            "ticks={} written={} rate={} worst_tick_us={} computed={} fastest={} wrong_answers={}",
            self.ticks.load(Ordering::Relaxed),
            self.written.load(Ordering::Relaxed),
            lock(&self.pacer).rate(),
            self.worst_tick_us.load(Ordering::Relaxed),
            self.computed.load(Ordering::Relaxed),
            self.burner.as_ref().map_or(0, Burner::fastest),
            self.wrong_answers.load(Ordering::Relaxed),
        )
    }
}

fn dropped(caches: system::Caches) -> Result<String, String> {
    done(system::drop_caches(caches))
}

fn done(result: std::io::Result<()>) -> Result<String, String> {
    result.map(|()| String::new()).map_err(|error| error.to_string())
}

fn shown(checked: Checked) -> String {
    let first = checked.first_wrong.unwrap_or_else(|| "none".to_owned());
    format!("pages={} wrong={} first={first}", checked.pages, checked.wrong)
}
