//! Threads that read batches from one guest's RAM: mapped per batch, mapped
//! once, or copied by the kernel.

#![expect(unsafe_code, reason = "what mapping guest memory costs is measured")]

use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::time::{Duration, Instant};

use ram::Mapping;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::{BATCH_BYTES, PAGE_BYTES, RAM_BYTES, ROUNDS, THREADS, gb_per_s, median, run};

/// The steps of a batch, in the paper's words: mmap, guest map, munmap; and the
/// copy that they serve.
const STEPS: usize = 4;

/// Time spent in each step.
#[derive(Clone, Copy, Default)]
struct Spent([Duration; STEPS]);

impl Spent {
    fn take<T>(&mut self, step: usize, what: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let made = what();
        self.0[step] += began.elapsed();
        made
    }
}

/// A contender's result of one round.
struct Round {
    gb_per_s: f64,
    /// Microseconds in each step.
    steps_us: [f64; STEPS],
}

/// A file's bytes, mapped into this process until dropped.
struct Mapped {
    address: usize,
    bytes: usize,
}

impl Mapped {
    fn new(file: &File, offset: usize, bytes: usize) -> Self {
        let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: no address is requested, so no existing mapping changes.
        let base =
            unsafe { mmap(std::ptr::null_mut(), bytes, protection, flags, file, offset as u64) }
                .expect("address space");
        Self { address: base.expose_provenance(), bytes }
    }

    fn populate(&self) {
        let base = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the range is the mapped one, and this has no visible effect.
        unsafe { madvise(base, self.bytes, Advice::LinuxPopulateRead) }.expect("pages");
    }

    fn copy(&self, at: usize, into: &mut [u8]) {
        assert!(at + into.len() <= self.bytes);
        let from = std::ptr::with_exposed_provenance::<u8>(self.address + at);
        // SAFETY: inside the mapping, as just checked; no thread writes the
        // file.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        black_box(into);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let base = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the range is the one that was mapped; no reference into it is
        // ever made.
        unsafe { munmap(base, self.bytes) }.expect("unmapping what was mapped");
    }
}

/// Maps each batch, as PMigrate did.
fn per_batch(file: &File, threads: usize) -> Round {
    measure(threads, |first, spent, buffer| {
        let at = first * PAGE_BYTES;
        let mapped = spent.take(0, || Mapped::new(file, at, BATCH_BYTES));
        spent.take(1, || mapped.populate());
        spent.take(3, || mapped.copy(0, buffer));
        spent.take(2, || drop(mapped));
    })
}

fn lasting(mapped: &Mapped, threads: usize) -> Round {
    measure(threads, |first, spent, buffer| {
        spent.take(3, || mapped.copy(first * PAGE_BYTES, buffer));
    })
}

fn by_the_kernel(ram: &Mapping, threads: usize) -> Round {
    measure(threads, |first, spent, buffer| {
        let at = (first * PAGE_BYTES) as u64;
        spent.take(3, || ram.read(at, buffer)).expect("it is inside");
    })
}

fn measure(threads: usize, batch: impl Fn(usize, &mut Spent, &mut [u8]) + Sync) -> Round {
    let sums = parking_lot::Mutex::new(Spent::default());
    let (passed, batches, works) = run(threads, || {
        let mut worker =
            Worker { spent: Spent::default(), buffer: vec![1; BATCH_BYTES], sums: &sums };
        let batch = &batch;
        move |first| {
            let worker = &mut worker;
            batch(first, &mut worker.spent, &mut worker.buffer);
        }
    });
    drop(works);
    let spent = sums.into_inner();
    Round {
        gb_per_s: gb_per_s(passed, batches),
        steps_us: spent.0.map(|step| step.as_secs_f64() * 1e6 / batches as f64),
    }
}

/// Adds its thread's times to the sums when dropped.
struct Worker<'s> {
    spent: Spent,
    buffer: Vec<u8>,
    sums: &'s parking_lot::Mutex<Spent>,
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        let mut sums = self.sums.lock();
        sums.0.iter_mut().zip(self.spent.0).for_each(|(sum, more)| *sum += more);
    }
}

/// A guest's RAM as a file, fully allocated.
fn file() -> File {
    let mut file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).expect("a memfd"));
    let piece = vec![1; 1 << 20];
    (0..RAM_BYTES >> 20).for_each(|_| file.write_all(&piece).expect("memory"));
    file
}

pub(crate) fn print() {
    let file = file();
    let mapped = Mapped::new(&file, 0, RAM_BYTES);
    mapped.populate();
    let ram = Mapping::own(RAM_BYTES as u64);
    ram.fill(0, RAM_BYTES as u64, 1).expect("there is so much memory");
    println!("### Mapping: batches read from the RAM of one guest\n");
    println!(
        "| threads | per batch: mmap us | guest map us | munmap us | copy us | GB/s \
         | mapped once: copy us | GB/s | copied by the kernel: us | GB/s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for threads in THREADS {
        let mut rounds: [Vec<Round>; 3] = Default::default();
        for _ in 0..ROUNDS {
            rounds[0].push(per_batch(&file, threads));
            rounds[1].push(lasting(&mapped, threads));
            rounds[2].push(by_the_kernel(&ram, threads));
        }
        let step = |of: &[Round], step: usize| {
            format!("{:.1}", median(of.iter().map(|round| round.steps_us[step]).collect()))
        };
        let speed = |of: &[Round]| {
            format!("{:.2}", median(of.iter().map(|round| round.gb_per_s).collect()))
        };
        let [each, once, kernel] = &rounds;
        let mut cells: Vec<String> = (0..STEPS).map(|nth| step(each, nth)).collect();
        cells.push(speed(each));
        for other in [once, kernel] {
            cells.extend([step(other, 3), speed(other)]);
        }
        println!("| {threads} | {} |", cells.join(" | "));
    }
    println!(
        "\nus: the average time of one operation, as long as its thread waited for it, whether for \
         a lock or for a core.\n"
    );
}
