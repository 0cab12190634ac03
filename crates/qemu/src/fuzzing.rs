//! Entry points for the fuzzer (`fuzz/`): what QEMU says of itself, in words and in
//! JSON.

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
