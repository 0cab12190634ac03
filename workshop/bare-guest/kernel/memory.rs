//! The boot loader's information, and the memory after the kernel.

use core::mem::MaybeUninit;
use core::ptr;
use core::slice;

use guest_pages::PAGE_BYTES;
use guest_pages::memory::Page;

const HAS_MEMORY: u32 = 1;
const HAS_COMMAND_LINE: u32 = 1 << 2;
const COMMAND_LINE_MAX: usize = 4096;
const MIB: usize = 1 << 20;

unsafe extern "C" {
    static bss_end: u8;
}

/// The beginning of a multiboot loader's information.
#[repr(C)]
pub(crate) struct Info {
    flags: u32,
    _lower_kib: u32,
    upper_kib: u32,
    _boot_device: u32,
    command_line: u32,
}

impl Info {
    /// The information at that address.
    ///
    /// # Safety
    /// It must be the information that a multiboot loader gave the kernel.
    pub(crate) unsafe fn at(address: u32) -> &'static Self {
        // SAFETY: as the caller says; nothing writes to it.
        unsafe { &*ptr::with_exposed_provenance(address as usize) }
    }

    /// The kernel's command line; empty if there is none that is text.
    pub(crate) fn command_line(&self) -> &'static str {
        if self.flags & HAS_COMMAND_LINE == 0 {
            return "";
        }
        let first = ptr::with_exposed_provenance::<u8>(self.command_line as usize);
        // SAFETY: it is in memory that nothing writes to, and ends with a zero.
        let bytes = unsafe {
            let len = (0..COMMAND_LINE_MAX).take_while(|at| *first.add(*at) != 0).count();
            slice::from_raw_parts(first, len)
        };
        str::from_utf8(bytes).unwrap_or_default()
    }
}

/// Writes to each page of a value what is there already.
pub(crate) fn touch<T>(value: &mut T) {
    let bytes = ptr::from_mut(value).cast::<MaybeUninit<u8>>();
    let last = size_of::<T>().saturating_sub(1);
    for at in (0..last).step_by(PAGE_BYTES).chain([last]) {
        // SAFETY: it is a byte of the value, and stays what it is.
        unsafe {
            let byte = bytes.add(at);
            byte.write_volatile(byte.read_volatile());
        }
    }
}

/// Unused memory, from the kernel's end to the first hole.
pub(crate) struct Memory {
    next: usize,
    end: usize,
}

impl Memory {
    /// All memory after the kernel.
    ///
    /// # Safety
    /// There must be only one of it.
    pub(crate) unsafe fn of(info: &Info) -> Self {
        let upper_kib = if info.flags & HAS_MEMORY == 0 { 0 } else { info.upper_kib };
        let next = (&raw const bss_end).expose_provenance();
        Self { next, end: MIB + ((upper_kib as usize) << 10) }
    }

    /// Takes room for `count` values; none if there isn't enough.
    fn take<T>(&mut self, count: usize) -> Option<*mut T> {
        let first = self.next.next_multiple_of(align_of::<T>());
        let end = count.checked_mul(size_of::<T>()).and_then(|bytes| first.checked_add(bytes))?;
        self.next = (end <= self.end).then_some(end)?;
        Some(ptr::with_exposed_provenance_mut(first))
    }

    /// Takes `count` pages, with any content.
    pub(crate) fn pages(&mut self, count: usize) -> Option<&'static mut [Page]> {
        let first = self.take(count)?;
        // SAFETY: the memory is unused otherwise, and any bytes are a page.
        Some(unsafe { slice::from_raw_parts_mut(first, count) })
    }

    /// Takes `count` numbers, of any value.
    pub(crate) fn numbers(&mut self, count: usize) -> Option<&'static mut [u32]> {
        let first = self.take(count)?;
        // SAFETY: the memory is unused otherwise, and any bytes are a number.
        Some(unsafe { slice::from_raw_parts_mut(first, count) })
    }

    /// Stores a value until the end.
    pub(crate) fn keep<T>(&mut self, value: T) -> Option<&'static mut T> {
        let place = self.take::<T>(1)?;
        // SAFETY: the memory is unused otherwise, and aligned for the value.
        unsafe {
            place.write(value);
            Some(&mut *place)
        }
    }
}
