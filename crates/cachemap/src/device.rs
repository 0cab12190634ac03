//! A disk as the guest knows it.

use crate::Fault;
use crate::code::{Cursor, put, put_text};

/// The longest name, serial number or address.
pub(crate) const TEXT_BYTES_MAX: usize = 64;

/// A guest's disk, with all that helps to find it among QEMU's. None of it is reliable.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Device {
    /// The guest's name for it, such as `vda`, for display.
    pub name: String,
    /// The serial number that QEMU gives it; empty if it has none.
    pub serial: String,
    /// Where it is attached: a PCI address such as `0000:00:03.0`, or its counterpart on another
    /// bus.
    pub address: String,
    /// Its size, in sectors of 512 bytes.
    pub sectors: u64,
}

impl Device {
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        for text in [&self.name, &self.serial, &self.address] {
            put_text(&crate::code::cleaned(text, TEXT_BYTES_MAX), out);
        }
        put(self.sectors, out);
    }

    pub(crate) fn read(content: &[u8]) -> Result<Self, Fault> {
        let mut cursor = Cursor(content);
        let mut text = || cursor.text(TEXT_BYTES_MAX).map(str::to_owned);
        let (name, serial, address) = (text()?, text()?, text()?);
        let sectors = cursor.number()?;
        cursor.end()?;
        Ok(Self { name, serial, address, sectors })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_come_back_with_what_can_be_shown() {
        let device = Device {
            name: "vda".to_owned(),
            serial: "a\nb".to_owned(),
            address: "x".repeat(100),
            sectors: 9,
        };
        let mut bytes = Vec::new();
        device.write(&mut bytes);
        let serial = "ab".to_owned();
        let expected = Device { serial, address: "x".repeat(64), ..device };
        assert_eq!(Device::read(&bytes), Ok(expected));
        bytes.push(0);
        assert_eq!(Device::read(&bytes), Err(Fault::TooMuch));
    }
}
