//! I/O ports, and their devices.

use core::arch::asm;
use core::fmt;

use bare_guest::talk::{End, Port};

/// For error messages.
pub(crate) const CONSOLE: Serial = Serial(0x3f8);
/// The port where the lab listens.
pub(crate) const TALK: Serial = Serial(0x2f8);

/// A UART's registers, and bits of them.
const LINE_CONTROL: u16 = 3;
const LINE_STATUS: u16 = 5;
const HAS_RECEIVED: u8 = 1;
const HAS_SENT_ALL: u8 = 0x20;
/// Bytes that a UART takes when it has sent all.
const FIFO_BYTES: usize = 16;

const PIC_MASKS: [u16; 2] = [0x21, 0xa1];
const RESET: u16 = 0xcf9;
/// ACPI's power control, where the firmware of both machine types puts it.
const POWER: u16 = 0x604;
const SLEEP_S5: u16 = 0x2000;

fn write_u8(port: u16, value: u8) {
    // SAFETY: the ports here are of devices that have no access to memory.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) }
}

fn write_u16(port: u16, value: u16) {
    // SAFETY: as above.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") value, options(nomem, nostack)) }
}

fn read_u8(port: u16) -> u8 {
    let value;
    // SAFETY: as above.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) }
    value
}

/// Masks all interrupts of the legacy PICs.
pub(crate) fn silence_pics() {
    PIC_MASKS.into_iter().for_each(|port| write_u8(port, 0xff));
}

/// Ends the guest.
pub(crate) fn end(how: End) {
    match how {
        End::Reboot => write_u8(RESET, 6),
        End::PowerOff => write_u16(POWER, SLEEP_S5),
    }
}

/// A UART, by its first port.
pub(crate) struct Serial(u16);

impl Serial {
    pub(crate) fn set_up(&self) {
        // No interrupts; 115,200 baud, 8 bits; FIFOs, empty; ready.
        let settings = [(1, 0), (LINE_CONTROL, 0x80), (0, 1), (1, 0), (LINE_CONTROL, 3)];
        for (register, value) in settings.into_iter().chain([(2, 7), (4, 3)]) {
            write_u8(self.0 + register, value);
        }
    }

    fn status(&self) -> u8 {
        read_u8(self.0 + LINE_STATUS)
    }
}

impl Port for Serial {
    fn receive(&mut self) -> Option<u8> {
        (self.status() & HAS_RECEIVED != 0).then(|| read_u8(self.0))
    }

    fn send(&mut self, bytes: &[u8]) -> usize {
        if self.status() & HAS_SENT_ALL == 0 {
            return 0;
        }
        let count = bytes.len().min(FIFO_BYTES);
        bytes[..count].iter().for_each(|byte| write_u8(self.0, *byte));
        count
    }
}

/// Waits busily for the port: only for the last message.
impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut left = text.as_bytes();
        while !left.is_empty() {
            left = &left[self.send(left)..];
        }
        Ok(())
    }
}
