//! What the guest's threads do until it ends.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use lab_guest::burn::{self, Burner};
use lab_guest::cache::Load;
use lab_guest::count::Count;
use lab_guest::random::Random;

use crate::{Guest, lock, system};

const COUNT_EVERY_TICKS: u64 = 10;
/// How long a writer that rests waits before it looks again.
const REST: Duration = Duration::from_millis(1);
/// How long one without a rate waits: to wake up for nothing costs CPU time under TCG.
const IDLE: Duration = Duration::from_millis(50);
/// Rounds that count as one piece of work.
const COMPUTE_AT_ONCE: u32 = 10_000;

pub(crate) fn use_cache(guest: &Guest) {
    if let Some(load) = guest.load.as_ref().filter(|_| guest.orders.cache_rate > 0)
        && let Err(error) = load.run()
    {
        eprintln!("guest: cached files: {error}");
    }
}

/// Sends heartbeats, with priority over all other threads.
pub(crate) fn tick(guest: &Guest) {
    if let Err(error) = rustix::process::setpriority_process(None, -20) {
        eprintln!("guest: no priority for heartbeats: {error}");
    }
    let mut last = Instant::now();
    let period = guest.orders.tick();
    let mut count = match Count::new() {
        Ok(count) => count,
        Err(error) => return eprintln!("guest: no heartbeats: {error}"),
    };
    loop {
        thread::sleep(period.saturating_sub(last.elapsed()));
        let now = Instant::now();
        let gap = now - last;
        last = now;
        let gap_us = u64::try_from(gap.as_micros()).unwrap_or(u64::MAX);
        guest.worst_tick_us.fetch_max(gap_us, Ordering::Relaxed);
        let ticks = match count.step() {
            Ok(ticks) => ticks,
            Err(error) => return eprintln!("guest: no more heartbeats: {error}"),
        };
        guest.ticks.store(ticks, Ordering::Relaxed);
        if ticks.is_multiple_of(COUNT_EVERY_TICKS) {
            if !guest.is_met.load(Ordering::Relaxed) {
                guest.say(&guest.greeting());
            }
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

pub(crate) fn write(guest: &Guest) {
    system::keep_to(guest.orders.writer_cpu);
    match &guest.burner {
        Some(burner) => write_burning(guest, burner.clone()),
        None => write_at_leisure(guest),
    }
}

/// Writes and computes, and sleeps only while it rests.
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
pub(crate) fn compute(guest: &Guest) {
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
        let (rate, step) = {
            let pacer = lock(&guest.pacer);
            (pacer.rate(), pacer.step())
        };
        thread::sleep(if rate == 0 { IDLE } else { step });
        let now = Instant::now();
        let pages = lock(&guest.pacer).pages_due(now - last);
        last = now;
        if pages > 0 && !guest.rests() && !guest.has_written_all() {
            guest.write_pages(pages);
        }
    }
}
