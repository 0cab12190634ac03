//! Output of QEMU 7.2 and 10.0 for several machines, with views that are not read
//! cut short.

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// QEMU 7.2, `-machine pc -m 512`: the view that counts is the last.
const PC: &str = r#"FlatView #0
 AS "i440FX", root: bus master container
 AS "PIIX3", root: bus master container
 Root memory region: (none)
  No rendered FlatView

FlatView #1
 AS "I/O", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan
  0000000000000010-000000000000001f (prio 0, i/o): io @0000000000000010

FlatView #2
 AS "memory", root: system
 AS "cpu-memory-0", root: system
 Root memory region: system
  0000000000000000-00000000000bffff (prio 0, ram): pc.ram
  00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
  00000000000e0000-00000000000fffff (prio 0, rom): pc.bios @0000000000020000
  0000000000100000-000000001fffffff (prio 0, ram): pc.ram @0000000000100000
  00000000fec00000-00000000fec00fff (prio 0, i/o): ioapic
  00000000fed00000-00000000fed003ff (prio 0, i/o): hpet
  00000000fee00000-00000000feefffff (prio 4096, i/o): apic-msi
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios
"#;

/// QEMU 10.0, `-machine q35 -m 4352 -vga std`, after the firmware: with a gap,
/// shadowed firmware, and video memory.
const Q35: &str = r#"FlatView #0
 AS "cpu-smm-0", root: memory
 Root memory region: memory
  0000000000000000-000000007fffffff (prio 0, ram): pc.ram

FlatView #1
 AS "memory", root: system
 AS "cpu-memory-0", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
  00000000000c0000-00000000000cafff (prio 0, rom): pc.ram @00000000000c0000
  00000000000cb000-00000000000cdfff (prio 0, ram): pc.ram @00000000000cb000
  00000000000f0000-00000000000fffff (prio 0, rom): pc.ram @00000000000f0000
  0000000000100000-000000007fffffff (prio 0, ram): pc.ram @0000000000100000
  00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram
  00000000fec00000-00000000fec00fff (prio 0, i/o): ioapic
  0000000100000000-000000018fffffff (prio 0, ram): pc.ram @0000000080000000
"#;

/// QEMU 10.0, a memory backend and a plugged DIMM.
const DIMM: &str = r#"FlatView #0
 AS "memory", root: system
 AS "cpu-memory-0", root: system
 Root memory region: system
  0000000000000000-00000000000bffff (prio 0, ram): ram0
  00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
  00000000000e0000-00000000000fffff (prio 0, rom): pc.bios @0000000000020000
  0000000000100000-000000001fffffff (prio 0, ram): ram0 @0000000000100000
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios
  0000000100000000-000000010fffffff (prio 0, ram): mem1

FlatView #1
 AS "I/O", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan
"#;

/// QEMU 7.2, two NUMA nodes of 32 MiB.
const NUMA: &str = r#"FlatView #1
 AS "memory", root: system
 AS "cpu-memory-0", root: system
 AS "cpu-memory-1", root: system
 Root memory region: system
  0000000000000000-00000000000bffff (prio 0, ram): a
  00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
  00000000000e0000-00000000000fffff (prio 0, rom): pc.bios @0000000000020000
  0000000000100000-0000000001ffffff (prio 0, ram): a @0000000000100000
  0000000002000000-0000000003ffffff (prio 0, ram): b
"#;

/// QEMU 7.2 with `-accel kvm`, a memory backend and a virtio-mem device.
const KVM: &str = r#"FlatView #1
 AS "memory", root: system
 AS "cpu-memory-0", root: system
 Root memory region: system
  0000000000000000-00000000000bffff (prio 0, ram): r KVM
  00000000000c0000-00000000000dffff (prio 1, rom): pc.rom KVM
  00000000000e0000-00000000000fffff (prio 0, rom): pc.bios @0000000000020000 KVM
  0000000000100000-0000000003ffffff (prio 0, ram): r @0000000000100000 KVM
  00000000fec00000-00000000fec00fff (prio 0, i/o): kvm-ioapic
  00000000fed00000-00000000fed003ff (prio 0, i/o): hpet
  00000000fee00000-00000000feefffff (prio 4096, i/o): kvm-apic-msi
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios KVM
  0000000100000000-000000011fffffff (prio 0, ram): vm0 KVM

FlatView #2
 AS "I/O", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan
"#;

fn page(address: u64) -> u64 {
    address / PAGE_BYTES
}

fn at(block: usize, offset: u64) -> Option<BlockOffset> {
    Some(BlockOffset { block, offset })
}

#[test]
fn machines_of_both_versions_are_understood() {
    type Row<'a> = (&'a str, &'a [(&'a str, u64)], &'a [(u64, Option<BlockOffset>)], u64);
    let pc: [(&str, u64); 2] = [("vga.vram", 16 * MIB), ("pc.ram", 512 * MIB)];
    let q35 = [("pc.ram", 4352 * MIB)];
    let dimm = [("ram0", 512 * MIB), ("mem1", 256 * MIB)];
    let numa = [("b", 32 * MIB), ("a", 32 * MIB)];
    let kvm = [("0000:00:01.0/vm0", 512 * MIB), ("r", 64 * MIB)];
    let table: [Row<'_>; 5] = [
        (
            PC,
            &pc,
            &[
                (0, at(1, 0)),
                (0xbf000, at(1, 0xbf000)),
                (0xc0000, None),
                (MIB, at(1, MIB)),
                (512 * MIB - 4096, at(1, 512 * MIB - 4096)),
                (512 * MIB, None),
                (0xfec0_0000, None),
            ],
            512 * MIB - 256 * 1024,
        ),
        (
            Q35,
            &q35,
            &[
                (2 * GIB - 4096, at(0, 2 * GIB - 4096)),
                (2 * GIB, None),
                (0xc0000, None),
                (0xcb000, at(0, 0xcb000)),
                (0xfd00_0000, None),
                (4 * GIB - 4096, None),
                (4 * GIB, at(0, 2 * GIB)),
                (0x1_8fff_f000, at(0, 0x1_0fff_f000)),
                (0x1_9000_0000, None),
            ],
            4352 * MIB - 0x60000 + 0x3000,
        ),
        (DIMM, &dimm, &[(MIB, at(0, MIB)), (4 * GIB + 4096, at(1, 4096))], 768 * MIB - 0x40000),
        (
            NUMA,
            &numa,
            &[(31 * MIB, at(1, 31 * MIB)), (33 * MIB, at(0, MIB)), (64 * MIB, None)],
            64 * MIB - 0x40000,
        ),
        (
            KVM,
            &kvm,
            &[
                (0, at(1, 0)),
                (0xc0000, None),
                (MIB, at(1, MIB)),
                (64 * MIB - 4096, at(1, 64 * MIB - 4096)),
                (64 * MIB, None),
                (4 * GIB + 2 * MIB, at(0, 2 * MIB)),
                (4 * GIB + 512 * MIB, None),
            ],
            576 * MIB - 0x40000,
        ),
    ];
    for (text, blocks, expected, bytes) in table {
        for text in [text.to_owned(), text.replace('\n', "\r\n")] {
            let memory = GuestMemory::read(&text, blocks.iter().copied());
            for (address, place) in expected {
                assert_eq!(
                    memory.lookup_run(page(*address), 1).map(|(place, _)| place),
                    *place,
                    "{address:#x} of {text}"
                );
            }
            assert_eq!(memory.pages(), page(bytes), "{text}");
        }
    }
}

#[test]
fn a_run_ends_with_its_range() {
    let memory = GuestMemory::read(NUMA, [("a", 32 * MIB), ("b", 32 * MIB)]);
    let last = page(32 * MIB) - 3;
    assert_eq!(memory.lookup_run(last, 100), at(0, last * PAGE_BYTES).map(|place| (place, 3)));
    assert_eq!(memory.lookup_run(last, 2).unwrap().1, 2);
    assert_eq!(memory.lookup_run(page(64 * MIB), 2), None);
    assert_eq!(memory.lookup_run(u64::MAX, u64::MAX), None);
}

#[test]
fn invalid_ranges_have_no_place() {
    let view = |lines: &str| format!("FlatView #0\n AS \"memory\", root: system\n{lines}");
    let ram = |line: &str| format!("  {line}\n");
    let whole = ram("0000000000000000-000000000000ffff (prio 0, ram): a @0000000000001000");
    let read = |text: &str, blocks: &[(&str, u64)]| {
        GuestMemory::read(&view(text), blocks.iter().copied()).pages()
    };
    assert_eq!(read(&whole, &[("a", 0x11000)]), 16);
    assert_eq!(read(&whole, &[("a", 0x10fff)]), 0, "beyond the block");
    assert_eq!(read(&whole, &[("a", 0x11000), ("a", 0x11000)]), 0, "two of that name");
    assert_eq!(read(&whole.repeat(2), &[("a", 0x11000)]), 0, "twice");
    assert_eq!(GuestMemory::read(&whole, [("a", 0x11000)]).pages(), 0, "in no view");
    for (line, pages) in [
        // Only whole pages, and only where they are whole in the block.
        ("0000000000000800-0000000000002fff (prio 0, ram): a @0000000000000800", 2),
        ("0000000000000800-0000000000002fff (prio 0, ram): a", 0),
        ("0000000000000000-0000000000000ffe (prio 0, ram): a", 0),
        ("0000000000000000-0000000000000fff (prio -1, nv-ram): a", 1),
        ("0000000000000000-0000000000000fff (prio 0, ramd): a", 0),
        ("0000000000001000-0000000000000fff (prio 0, ram): a", 0),
        ("0000000000000000-ffffffffffffffff (prio 0, ram): a", 0),
        ("+000000000000000-0000000000000fff (prio 0, ram): a", 0),
        ("0-fff (prio 0, ram): a", 0),
        ("0000000000000000-0000000000000fff (prio 0, ram): a @ffffffffffffffff", 0),
        ("0000000000000000-0000000000000fff (prio 0, ram): a b @0000000000000000", 0),
        // KVM, in two address spaces of the view; it is no part of a name.
        ("0000000000000000-0000000000000fff (prio 0, ram): a @0000000000001000 KVM KVM", 1),
        ("0000000000000000-0000000000000fff (prio 0, ram): aKVM", 0),
        ("0000000000000000-0000000000000fff (prio 0, ram):  KVM", 0),
        // A block may have a path in front, its memory has none.
        ("0000000000000000-0000000000000fff (prio 0, ram): b/a", 0),
        ("0000000000000000-0000000000000fff (prio 0, ram): ", 0),
        ("0000000000000000-0000000000000fff (ram): a", 0),
    ] {
        assert_eq!(read(&ram(line), &[("a", 0x10000)]), pages, "{line}");
    }
}

proptest! {
    #[test]
    fn any_layout_is_read_back(lengths in prop::collection::vec((0_u64..9, 1_u64..50), 1..20)) {
        let mut text = "FlatView #7\n AS \"memory\", root: system\n".to_owned();
        let (mut address, mut offset, mut expected) = (0, 0, Vec::new());
        for (gap, pages) in &lengths {
            address += gap;
            for nth in 0..*pages {
                expected.push((address + nth, (offset + nth) * PAGE_BYTES));
            }
            let bytes = pages * PAGE_BYTES;
            let first = address * PAGE_BYTES;
            let at = offset * PAGE_BYTES;
            text += &format!("  {first:016x}-{:016x} (prio 0, ram): m @{at:016x}\n", first + bytes - 1);
            (address, offset) = (address + pages, offset + pages);
        }
        let memory = GuestMemory::read(&text, [("m", offset * PAGE_BYTES)]);
        prop_assert_eq!(memory.pages(), offset);
        for (page, offset) in expected {
            let expected = Some((BlockOffset { block: 0, offset }, 1));
            prop_assert_eq!(memory.lookup_run(page, 1), expected);
        }
    }

    #[test]
    fn any_text_is_read(text in "(FlatView #|AS \"memory\",|\\n| |[0-9a-f]{16}-[0-9a-f]{16} \\(prio 0, ram\\): a|@[0-9a-f]{16}|\\PC){0,60}") {
        crate::fuzzing::memory(text.as_bytes());
    }
}
