//! The kernel: one CPU speaks, and it or a second one writes. Nothing interrupts their work: they
//! take turns, and halt until the next.
#![no_std]
#![no_main]
#![expect(unsafe_code, reason = "there is no operating system below")]

mod cpu;
mod memory;
mod ports;

use core::arch::global_asm;
use core::fmt::{self, Write};
use core::panic::PanicInfo;
use core::time::Duration;

use bare_guest::lock::Lock;
use bare_guest::talk::Talk;
use bare_guest::writing::Writing;
use bare_guest::{Next, Shared};
use guest_pages::memory::Area;
use guest_pages::orders::Orders;
use guest_pages::plan::{Plan, Plans};
use guest_pages::writer::Writer;

use cpu::Clock;
use memory::{Info, Memory};
use ports::{CONSOLE, TALK};

global_asm!(include_str!("boot.s"), options(att_syntax));

type Work = (Writing<'static, 'static>, Clock);

/// Work of the second CPU.
static WORK: Lock<Option<Work>> = Lock::new(None);

/// Called by `boot.s` with the loader's information.
///
/// # Safety
/// Only `boot.s` may call it, once.
#[unsafe(no_mangle)]
unsafe extern "C" fn boot(info: u32) -> ! {
    let boot_id = cpu::cycles();
    [CONSOLE, TALK].iter().for_each(ports::Serial::set_up);
    ports::silence_pics();
    cpu::set_up();
    // SAFETY: it is what the loader gave, and this is called once.
    let (info, memory) = unsafe {
        let info = Info::at(info);
        (info, Memory::of(info))
    };
    let orders = match Orders::read(info.command_line()) {
        Ok(orders) if bare_guest::is_possible(&orders) => orders,
        Ok(orders) => die(format_args!("these orders need Linux: {orders}")),
        Err(bad) => die(format_args!("{bad}")),
    };
    run(&orders, boot_id, memory)
}

fn run(orders: &Orders, boot_id: u64, mut memory: Memory) -> ! {
    let clock = Clock::new();
    let Plans { fixed, working_set } = Plans::of(orders);
    let fixed = fixed.map(|plan| fill(&mut memory, plan, false));
    let writer = Writer::new(fill(&mut memory, working_set, true), orders.order, orders.seed);
    let Some(shared) = memory.keep(Shared::new(orders, writer)) else {
        die(format_args!("there is no memory for the writer"));
    };
    let mut writing = Writing::new(orders, shared, || clock.now());
    let talk = Talk::new(orders, boot_id, shared, fixed, writing.fastest());
    if orders.writer_cpu == 2 {
        WORK.with(|work| *work = Some((writing, clock)));
        if !cpu::start_second(&clock) {
            die(format_args!("there is no second CPU"));
        }
        speak(talk, &clock, || Next::At(Duration::MAX));
    }
    speak(talk, &clock, || writing.turn(clock.now()))
}

/// Speaks for ever, and calls `act` between turns.
fn speak(mut talk: Talk<'_, '_>, clock: &Clock, mut act: impl FnMut() -> Next) -> ! {
    let mut port = TALK;
    loop {
        let next = talk.turn(clock.now(), &mut port).min(act());
        if let Some(how) = talk.end() {
            ports::end(how);
            cpu::stop();
        }
        wait(next, clock, &mut talk);
    }
}

/// QEMU's TCG can lose the mark of a page that was just written, and then sees no write to it until
/// its TLB is flushed, which nothing else does here. So that a moved guest does not go back to an
/// earlier state, `state` is marked once more (docs/TESTING-RESULTS.md, "Wrong pages").
fn wait<T>(next: Next, clock: &Clock, state: &mut T) {
    if let Next::At(until) = next {
        clock.sleep_until(until, || {
            cpu::flush_tlb();
            memory::touch(state);
        });
    }
}

/// Called by `boot.s` on the second CPU.
///
/// # Safety
/// Only `boot.s` may call it.
#[unsafe(no_mangle)]
unsafe extern "C" fn second() -> ! {
    cpu::set_up();
    cpu::second_is_up();
    let Some((mut writing, clock)) = WORK.with(Option::take) else { cpu::stop() };
    loop {
        wait(writing.turn(clock.now()), &clock, &mut writing);
    }
}

fn fill(memory: &mut Memory, plan: Plan, rewritten: bool) -> Area<'static> {
    let versions = if rewritten { plan.pages } else { 0 };
    let (pages, versions) = (memory.pages(plan.pages), memory.numbers(versions));
    match (pages, versions) {
        (Some(pages), Some(versions)) => Area::fill(plan, pages, versions),
        _ => die(format_args!("there is no memory for {} pages of {}", plan.pages, plan.name)),
    }
}

/// Prints the reason on the console, which the lab shows when a guest stays silent.
fn die(why: fmt::Arguments<'_>) -> ! {
    let mut console = CONSOLE;
    // There is no other place to report a failure to print.
    let _ = writeln!(console, "guest: {why}");
    cpu::stop()
}

/// Called by `boot.s` with the exception's number and the stack that the processor left.
///
/// # Safety
/// The pointer must be to that stack.
#[unsafe(no_mangle)]
unsafe extern "C" fn die_of_exception(number: u64, stack: *const [u64; 3]) -> ! {
    // SAFETY: as the caller says; the processor leaves three words or more.
    let stack = unsafe { stack.read() };
    die(format_args!("exception {number}, stack {stack:#x?}"))
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    die(format_args!("{info}"))
}
