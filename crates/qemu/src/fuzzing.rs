//! Entry points for the fuzzer (`fuzz/`): what QEMU says of itself, in words and in
//! JSON.

use crate::guest_disks::{self, Reading};
use crate::guest_memory::GuestMemory;

/// Any bytes as what `info mtree -f` says.
///
/// # Panics
/// If something is wrong with the crate.
pub fn memory(bytes: &[u8]) {
    let blocks = [("a", 1 << 20), ("pc.ram", 1 << 40)];
    let memory = GuestMemory::read(&String::from_utf8_lossy(bytes), blocks);
    assert!(memory.pages() <= 1 << 52);
    for page in [0, 1, 255, 256, 1 << 20, u64::MAX] {
        let Some((place, pages)) = memory.lookup_run(page, u64::MAX) else { continue };
        let bytes = pages * cachemap::PAGE_BYTES;
        let block = blocks.get(place.block).expect("a block that was given");
        assert!(pages > 0 && place.offset + bytes <= block.1);
    }
}

/// Any bytes as what QEMU says of its disks, and as what a guest says of its own.
///
/// # Panics
/// If something is wrong with the crate.
pub fn disks(bytes: &[u8]) {
    let Ok(answers) = serde_json::from_slice(bytes) else { return };
    let disks = guest_disks::of_answers(&answers);
    let told: Vec<cachemap::Device> = disks
        .iter()
        .map(|disk| cachemap::Device {
            name: String::new(),
            serial: disk.serial.clone(),
            address: disk.address.clone().unwrap_or_default(),
            sectors: disk.bytes / cachemap::SECTOR_BYTES,
        })
        .collect();
    for (nth, found) in guest_disks::matched(&told, &disks).into_iter().enumerate() {
        assert!(found.is_err() || found == Ok(nth), "{found:?}");
    }
    for disk in disks {
        if let Reading::Direct { path, .. } = disk.reading {
            assert!(path.is_absolute());
        }
    }
}

/// Memory as QEMU tells it, to mutate.
#[must_use]
pub fn seed_memory() -> [&'static str; 1] {
    ["FlatView #0\n AS \"I/O\", root: io\n  0000000000000000-0000000000000007 (prio 0, i/o): a\n\n\
      FlatView #1\n AS \"memory\", root: system\n Root memory region: system\n\
      \x20 0000000000000000-00000000000bffff (prio 0, ram): pc.ram\n\
      \x20 00000000000c0000-00000000000dffff (prio 1, rom): pc.rom\n\
      \x20 0000000000100000-00000000bfffffff (prio 0, ram): pc.ram @0000000000100000\n\
      \x20 0000000100000000-00000001000fffff (prio 0, ram): a\n\
      \x20 0000000200000000-000000023fffffff (prio 0, ram): pc.ram @00000000c0000000\n"]
}

/// Disks as QEMU tells them, to mutate.
#[must_use]
pub fn seed_disks() -> [&'static str; 2] {
    [include_str!("guest_disks/recorded/7.2.json"), include_str!("guest_disks/recorded/10.0.json")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_sound() {
        for text in seed_memory() {
            memory(text.as_bytes());
            let read = GuestMemory::read(text, [("a", 1 << 20), ("pc.ram", 1 << 40)]);
            assert_eq!(read.pages(), (4 << 18) - 64 + 256);
        }
        for text in seed_disks() {
            disks(text.as_bytes());
        }
    }
}
