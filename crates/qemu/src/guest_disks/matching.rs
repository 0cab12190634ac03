//! Which of QEMU's disks is the one that a guest reports.

use cachemap::Device;

use super::GuestDisk;

/// Why a guest's disk is not certain to be one of QEMU's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unmatched {
    /// None of QEMU's disks matches.
    #[error("QEMU has no virtio disk with {what}")]
    Unknown {
        /// What was looked for.
        what: String,
    },
    /// More than one matches.
    #[error("several disks have {what}")]
    Ambiguous {
        /// What they have in common.
        what: String,
    },
    /// One matches by serial number or address, and differs otherwise.
    #[error("QEMU's disk with {what} is {theirs}, and the guest's is {told}")]
    Differs {
        /// What it was found by.
        what: String,
        /// QEMU's.
        theirs: String,
        /// The guest's.
        told: String,
    },
}

/// The index of the disk for each device that a guest reports, if it is certain: the
/// serial number matches, or, without one, the address on the bus, and so does everything
/// else that is known of both.
#[must_use]
pub fn matched(devices: &[Device], disks: &[GuestDisk]) -> Vec<Result<usize, Unmatched>> {
    let found: Vec<Result<usize, Unmatched>> =
        devices.iter().map(|device| one(device, disks)).collect();
    let is_shared =
        |disk: &usize| found.iter().filter(|other| other.as_ref() == Ok(disk)).count() > 1;
    let once = |(device, disk): (&Device, &Result<usize, Unmatched>)| match disk {
        Ok(disk) if is_shared(disk) => Err(Unmatched::Ambiguous { what: sought(device) }),
        disk => disk.clone(),
    };
    devices.iter().zip(&found).map(once).collect()
}

fn one(device: &Device, disks: &[GuestDisk]) -> Result<usize, Unmatched> {
    let serial = device.serial.trim();
    let fits = |disk: &GuestDisk| {
        let same_serial = disk.serial == serial;
        let same_place = disk.address.as_ref() == Some(&device.address);
        same_serial && (!serial.is_empty() || same_place)
    };
    let what = sought(device);
    let mut fitting = disks.iter().enumerate().filter(|(_, disk)| fits(disk));
    let Some((nth, disk)) = fitting.next() else { return Err(Unmatched::Unknown { what }) };
    if fitting.next().is_some() {
        return Err(Unmatched::Ambiguous { what });
    }
    let differs = |theirs, told| Err(Unmatched::Differs { what: what.clone(), theirs, told });
    if let Some(address) = disk.address.as_ref().filter(|address| **address != device.address) {
        return differs(format!("at {address}"), format!("at {}", device.address));
    }
    let sectors = disk.bytes / cachemap::SECTOR_BYTES;
    if sectors != device.sectors && disk.bytes != 0 {
        let shown = |sectors| format!("{sectors} sectors long");
        return differs(shown(sectors), shown(device.sectors));
    }
    Ok(nth)
}

fn sought(device: &Device) -> String {
    match device.serial.trim() {
        "" => format!("the address {} and no serial number", device.address),
        serial => format!("the serial number {serial}"),
    }
}
