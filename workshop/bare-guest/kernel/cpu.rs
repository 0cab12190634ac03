//! A CPU: its clock, its timer, its interrupts; and the start of the second CPU.

use core::arch::asm;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use core::{hint, ptr};

use bare_guest::lock::Lock;

/// The local APIC: each CPU sees its own.
const APIC: usize = 0xfee0_0000;
const SPURIOUS: usize = 0xf0;
const COMMAND: usize = 0x300;
const COMMAND_TO: usize = 0x310;
const TIMER: usize = 0x320;
const TIMER_START: usize = 0x380;
const TIMER_LEFT: usize = 0x390;
const TIMER_DIVIDE: usize = 0x3e0;

const ENABLED: u32 = 0x100;
const MASKED: u32 = 1 << 16;
const BY_ONE: u32 = 0xb;
/// The timer counts nanoseconds, in QEMU's APIC and in KVM's.
const LONGEST: Duration = Duration::from_nanos(u32::MAX as u64);
/// Shortest sleep that is worth a halt.
const SHORTEST: Duration = Duration::from_micros(20);

const GATES_COUNT: usize = 256;
const GATES_LIMIT: u16 = 256 * 16 - 1;
const TIMER_VECTOR: u8 = 0x20;
const SPURIOUS_VECTOR: u8 = 0xff;

/// Where the second CPU starts: a page number, below 1 MiB.
const SECOND_PAGE: u8 = 8;
const SECOND_AT: usize = (SECOND_PAGE as usize) << 12;
const INIT: u32 = 0x4500;
const START_UP: u32 = 0x4600;
const SECOND_MAX: Duration = Duration::from_secs(5);

/// Nanoseconds of the timer to which the counter is compared, and how often. The comparison with
/// the least delay counts.
const CALIBRATION: u32 = 1_000_000;
const CALIBRATIONS: usize = 5;

unsafe extern "C" {
    static exceptions: u8;
    static second_begin: u8;
    static second_end: u8;
    fn timer_interrupt();
    fn spurious_interrupt();
}

fn write_apic(register: usize, value: u32) {
    // SAFETY: the APIC's registers are mapped, and belong to this CPU alone.
    unsafe { ptr::with_exposed_provenance_mut::<u32>(APIC + register).write_volatile(value) }
}

fn read_apic(register: usize) -> u32 {
    // SAFETY: as above.
    unsafe { ptr::with_exposed_provenance::<u32>(APIC + register).read_volatile() }
}

/// The processor's time-stamp counter.
pub(crate) fn cycles() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: it reads a counter.
    unsafe { asm!("rdtsc", out("eax") low, out("edx") high, options(nomem, nostack)) }
    u64::from(high) << 32 | u64::from(low)
}

/// Measures the time since it was made, by the time-stamp counter.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    since: u64,
    /// Cycles in [`CALIBRATION`].
    cycles: u64,
}

impl Clock {
    /// Calibrates the counter with the timer.
    pub(crate) fn new() -> Self {
        write_apic(TIMER, MASKED | u32::from(TIMER_VECTOR));
        let compared = || {
            write_apic(TIMER_START, u32::MAX);
            let before = cycles();
            while u32::MAX - read_apic(TIMER_LEFT) < CALIBRATION {}
            cycles() - before
        };
        // A delayed comparison counts too many cycles.
        let cycles_each = (0..CALIBRATIONS).map(|_| compared()).min().unwrap_or(1);
        write_apic(TIMER_START, 0);
        Self { since: cycles(), cycles: cycles_each.max(1) }
    }

    pub(crate) fn now(&self) -> Duration {
        let passed = cycles().saturating_sub(self.since);
        let nanos = u128::from(passed) * u128::from(CALIBRATION) / u128::from(self.cycles);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Halts the CPU until then, if that is worth it, and calls `before` first.
    pub(crate) fn sleep_until(&self, until: Duration, before: impl FnOnce()) {
        if until.saturating_sub(self.now()) < SHORTEST {
            return;
        }
        before();
        let sleep = until.saturating_sub(self.now());
        write_apic(TIMER, u32::from(TIMER_VECTOR));
        let nanos = u32::try_from(sleep.min(LONGEST).as_nanos()).unwrap_or(u32::MAX);
        // A timer that starts with 0 stands still.
        write_apic(TIMER_START, nanos.max(1));
        // SAFETY: `sti` takes effect after the next instruction, so an interrupt can't be missed
        // before `hlt`, and none arrives after `cli`; all that handlers use is their stack.
        unsafe { asm!("sti", "hlt", "cli") }
    }
}

/// Has the processor look up all addresses anew.
pub(crate) fn flush_tlb() {
    // SAFETY: the tables stay those that they are.
    unsafe { asm!("mov {tables}, cr3", "mov cr3, {tables}", tables = out(reg) _, options(nostack)) }
}

/// An entry of the interrupt descriptor table.
#[derive(Clone, Copy)]
#[repr(C)]
struct Gate([u16; 8]);

impl Gate {
    const NONE: Self = Self([0; 8]);

    fn to(handler: usize) -> Self {
        // The kernel is below 4 GiB.
        let [one, two, three, four, ..] = handler.to_le_bytes();
        let [low, high] = [[one, two], [three, four]].map(u16::from_le_bytes);
        // Present, an interrupt gate, 64-bit code.
        Self([low, 0x08, 0x8e00, high, 0, 0, 0, 0])
    }
}

#[repr(C, packed)]
struct Pointer {
    limit: u16,
    address: usize,
}

static GATES: Lock<[Gate; GATES_COUNT]> = Lock::new([Gate::NONE; GATES_COUNT]);
const _: () = assert!(GATES_LIMIT as usize + 1 == size_of::<[Gate; GATES_COUNT]>());

/// Lets this CPU take interrupts while it halts.
pub(crate) fn set_up() {
    let pointer = GATES.with(|gates| {
        // SAFETY: only its address is taken.
        let first = (&raw const exceptions).addr();
        for (number, gate) in gates.iter_mut().take(32).enumerate() {
            *gate = Gate::to(first + 16 * number);
        }
        gates[usize::from(TIMER_VECTOR)] = Gate::to(timer_interrupt as *const () as usize);
        gates[usize::from(SPURIOUS_VECTOR)] = Gate::to(spurious_interrupt as *const () as usize);
        Pointer { limit: GATES_LIMIT, address: gates.as_ptr().addr() }
    });
    // SAFETY: the table is static, and is filled as the processor wants it.
    unsafe { asm!("lidt [{}]", in(reg) &raw const pointer, options(readonly, nostack)) }
    write_apic(SPURIOUS, ENABLED | u32::from(SPURIOUS_VECTOR));
    write_apic(TIMER_DIVIDE, BY_ONE);
}

/// Whether the second CPU has started.
static IS_SECOND_UP: AtomicBool = AtomicBool::new(false);

/// Notes that the second CPU, which calls this, is up.
pub(crate) fn second_is_up() {
    IS_SECOND_UP.store(true, Ordering::Release);
}

/// Starts the second CPU at `second`, which notes that it is up. Returns whether it did.
pub(crate) fn start_second(clock: &Clock) -> bool {
    let (begin, end) = (&raw const second_begin, &raw const second_end);
    // SAFETY: nothing else is at that place, and the code fits a page.
    unsafe {
        let to = ptr::with_exposed_provenance_mut::<u8>(SECOND_AT);
        to.copy_from_nonoverlapping(begin, end.addr() - begin.addr());
    }
    let wait = |time, is_over: &dyn Fn() -> bool| {
        let until = clock.now() + time;
        while clock.now() < until && !is_over() {
            hint::spin_loop();
        }
    };
    for (command, time) in
        [(INIT, Duration::from_millis(10)), (START_UP | u32::from(SECOND_PAGE), SECOND_MAX)]
    {
        write_apic(COMMAND_TO, 1 << 24);
        write_apic(COMMAND, command);
        wait(time, &|| IS_SECOND_UP.load(Ordering::Acquire));
    }
    IS_SECOND_UP.load(Ordering::Acquire)
}

/// Halts this CPU for ever.
pub(crate) fn stop() -> ! {
    loop {
        // SAFETY: nothing follows.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) }
    }
}
