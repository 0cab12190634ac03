//! `faults COUNT SEED [AT ONCE [FIRST]]`: injects random faults, which depend only on seed and
//! number, and prints a table of the VMs' fates.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use lab::guest::System;
use lab::setup;

use end_to_end::faults::{Fate, Plan, Seen, Yard};

/// Two migrations at a time keep two cores busy, since a fault mostly waits.
const AT_ONCE: u64 = 2;

fn main() -> ExitCode {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|it| it.parse().ok()).collect();
    let [count, seed, ..] = numbers[..] else {
        eprintln!("faults: say how many and a seed: faults 100 1");
        return ExitCode::FAILURE;
    };
    let at_once = numbers.get(2).copied().unwrap_or(AT_ONCE).max(1);
    let first = numbers.get(3).copied().unwrap_or(0);
    // A plan's panics are part of its result, and not printed where they happen.
    std::panic::set_hook(Box::new(|_| {}));
    // Made once, since all runs boot the same guest.
    if let Err(error) = setup::ensure().and_then(|kit| setup::helper_initrd(&kit).map(drop)) {
        eprintln!("faults: {error}");
        return ExitCode::FAILURE;
    }
    let (next, end) = (AtomicU64::new(first), first + count);
    let (tell, told) = channel();
    let mut table: BTreeMap<(String, String), [u32; 3]> = BTreeMap::new();
    let mut wrong = 0;
    // Runs in which content came by name, and from disks; and how many bytes.
    let (mut named, mut stored) = ((0_u32, 0), (0_u32, 0));
    thread::scope(|scope| {
        for _ in 0..at_once {
            let (tell, next) = (tell.clone(), &next);
            scope.spawn(move || work(next, end, seed, &tell));
        }
        drop(tell);
        for (number, seen) in told {
            let note = |(runs, sum): &mut (u32, u64), bytes: u64| {
                *runs += u32::from(bytes > 0);
                *sum += bytes;
            };
            note(&mut named, seen.unsent.named_bytes);
            note(&mut stored, seen.unsent.stored_bytes);
            let what = format!("{number:4}  {seen}, {}", seen.phase);
            match &seen.fate {
                Ok(fate) => {
                    println!("{what}: {fate}");
                    let row = table.entry((seen.to_string(), seen.phase)).or_default();
                    row[*fate as usize] += 1;
                }
                Err(why) => {
                    wrong += 1;
                    println!("{what}: WRONG: {why}\n{:?}", Plan::random(seed, number));
                }
            }
        }
    });
    println!("\n| fault | journals then | stayed | moved | died with its QEMU |");
    println!("| --- | --- | --- | --- | --- |");
    for ((fault, phase), [stayed, moved, died]) in &table {
        println!("| {fault} | {phase} | {stayed} | {moved} | {died} |");
    }
    println!(
        "\n{} MB came by name, in {} of the runs; of that {} MB from disks, in {}",
        named.1 / 1_000_000,
        named.0,
        stored.1 / 1_000_000,
        stored.0
    );
    let right: u32 = table.values().flatten().sum();
    println!("\nseed {seed}: {right} faults, and the VM was where it had to be; {wrong} wrong");
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn work(next: &AtomicU64, end: u64, seed: u64, tell: &Sender<(u64, Seen)>) {
    let mut yard = Yard::new(System::Linux);
    loop {
        let number = next.fetch_add(1, Relaxed);
        if number >= end {
            return;
        }
        let seen = yard.try_one(&Plan::random(seed, number));
        if seen.fate.is_err() {
            yard = Yard::new(System::Linux);
        }
        if tell.send((number, seen)).is_err() {
            return;
        }
    }
}

// Their order is that of the table's columns.
const _: () = assert!(Fate::Stayed as usize == 0 && Fate::Died as usize == 2);
