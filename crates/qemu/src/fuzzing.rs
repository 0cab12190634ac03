//! Entry points for the fuzzer (`workshop/fuzz/`): QEMU's answers, as text and as JSON, and its
//! command line.

use crate::command_line::CommandLine;
use crate::commanded;
use crate::guest_disks::{self, Reading};
use crate::guest_memory::GuestMemory;

/// Reads any bytes as the output of `info mtree -f`.
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

/// Reads any bytes as QEMU's answers about its disks, and matches what a guest would report.
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

/// Reads any bytes as a command line, as the kernel shows it: of a QEMU that the agent
/// starts, and of one that another program has started.
///
/// # Panics
/// If something is wrong with the crate.
pub fn command_line(bytes: &[u8]) {
    let words = bytes.split(|byte| *byte == 0);
    let argv: Vec<String> = words.map(|one| String::from_utf8_lossy(one).into_owned()).collect();
    commanded::read(&argv);
    let kept = CommandLine::of_running(&argv);
    assert_eq!(CommandLine::of_running(&kept), kept, "nothing of ours is left");
    let Ok(line) = CommandLine::parse(&argv) else { return };
    assert_eq!(line.argv(), argv);
    let _ = (line.backends(), line.accelerator(), line.cpu_model(), line.memory_path());
    let _ = (line.needs_root(), line.has_guest_port(), line.has_free_page_hint());
    let _ = line.exclusive();
    let taps = line.passed_taps();
    let files: Vec<Vec<i32>> = taps.iter().map(|tap| vec![3; tap.queues]).collect();
    let started = line.with_tap_files(&files);
    assert!(started.passed_taps().is_empty() && started.tap_files().len() >= files.len());
    if let Ok(shared) = line.with_hand_over(|_| Some(2 << 20)) {
        assert_eq!(shared.with_hand_over(|_| None), Ok(shared), "once is enough");
    }
    let (without_user, _) = line.without_user();
    assert!(!without_user.names_user());
    let waiting = line.waiting(Some("pc")).with_switchover_ack();
    assert!(waiting.has("S") && waiting.arguments("incoming").last() == Some("defer"));
}

/// QEMU's description of memory, to mutate.
#[must_use]
pub fn seed_memory() -> [&'static str; 1] {
    ["FlatView #0\n AS \"I/O\", root: io\n  0000000000000000-0000000000000007 (prio 0, i/o): a\n\n\
      FlatView #1\n AS \"memory\", root: system\n Root memory region: system\n\
      \x20 0000000000000000-00000000000bffff (prio 0, ram): pc.ram\n\
      \x20 00000000000c0000-00000000000dffff (prio 1, rom): pc.rom\n\
      \x20 0000000000100000-00000000bfffffff (prio 0, ram): pc.ram @0000000000100000 KVM\n\
      \x20 0000000100000000-00000001000fffff (prio 0, ram): a KVM\n\
      \x20 0000000200000000-000000023fffffff (prio 0, ram): pc.ram @00000000c0000000\n"]
}

/// QEMU's answers about disks, to mutate.
#[must_use]
pub fn seed_disks() -> [&'static str; 2] {
    [include_str!("guest_disks/recorded/7.2.json"), include_str!("guest_disks/recorded/10.0.json")]
}

/// Command lines as libvirt and an operator write them, to mutate.
#[must_use]
pub fn seed_command_lines() -> [&'static str; 2] {
    [
        "qemu-system-x86_64\0-name\0guest=a,debug-threads=on\0-machine\0pc-q35-7.2,\
         memory-backend=pc.ram\0-object\0{\"qom-type\":\"memory-backend-memfd\",\"id\":\"pc.ram\",\
         \"size\":1073741824}\0-blockdev\0{\"driver\":\"file\",\"filename\":\"/a.img\",\
         \"node-name\":\"s\"}\0-blockdev\0{\"node-name\":\"f\",\"driver\":\"raw\",\"file\":\"s\"}\0\
         -device\0{\"driver\":\"virtio-blk-pci\",\"drive\":\"f\",\"id\":\"d\",\"bus\":\"pci.2\",\
         \"addr\":\"0x0\"}\0-device\0{\"driver\":\"virtio-scsi-pci\",\"id\":\"s\",\
         \"bus\":\"pci.3\",\"addr\":\"0x0\"}\0-device\0{\"driver\":\"scsi-hd\",\"bus\":\"s.0\",\
         \"channel\":0,\"scsi-id\":1,\"lun\":0,\"drive\":\"f\",\"id\":\"e\"}\0-incoming\0defer",
        "qemu-kvm\0-M\0q35,accel=kvm:tcg\0-cpu\0host\0-m\0size=1G,slots=2,maxmem=4G\0-numa\0\
         node,memdev=m,nodeid=0\0-object\0memory-backend-ram,id=m,size=1G\0-drive\0\
         file=a,,b.img,if=virtio,format=raw\0-runas\0nobody\0-mem-prealloc\0disk.img",
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
        for text in seed_command_lines() {
            command_line(text.as_bytes());
            let argv: Vec<_> = text.split('\0').collect();
            // `-incoming` is refused: only the agent may use it.
            assert_eq!(CommandLine::parse(&argv).is_err(), text.contains("-incoming"));
        }
    }

    proptest! {
        #[test]
        fn changed_seeds_are_read_or_refused(
            text in prop::sample::select(seed_memory().to_vec()),
            line in prop::sample::select(seed_command_lines().to_vec()),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            end in any::<prop::sample::Index>(),
        ) {
            for (seed, read) in [(text, memory as fn(&[u8])), (line, command_line)] {
                let mut bytes = seed.as_bytes().to_vec();
                for (place, byte) in &changes {
                    let place = place.index(bytes.len());
                    bytes[place] = *byte;
                }
                read(&bytes);
                bytes.truncate(end.index(bytes.len()));
                read(&bytes);
            }
        }
    }
}
