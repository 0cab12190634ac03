//! The guest's memory, from a command line.

use cachemap::{Limits, PAGE_BYTES};

use super::words::{Argument, Words};
use crate::guest_memory::PcMemory;
use crate::guest_port;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// QEMU has no more slots for memory.
const SLOTS_MAX: u64 = 256;

/// The RAM blocks of a PC, and where its gap starts; or why that isn't known.
pub(super) fn of(words: Words<'_>) -> Result<PcMemory, String> {
    let blocks = blocks(words).ok_or("its command line does not name its memory")?;
    let machine = machine(words).ok_or("its command line names no machine")?;
    let name = machine.get("type").or_else(|| machine.first()).unwrap_or_default();
    if machine.get("max-ram-below-4g").is_some() {
        return Err("its machine has max-ram-below-4g".to_owned());
    }
    let bytes = blocks.iter().try_fold(0, |sum: u64, (_, bytes)| sum.checked_add(*bytes));
    let bytes = bytes.ok_or("its command line does not name its memory")?;
    // These machines have a gap that ends at 4 GiB. If the RAM reaches it, it starts at a
    // whole GiB instead.
    let (least, gap) = match name.as_str() {
        "q35" => (0xb000_0000, 2 * GIB),
        "pc" => (0xe000_0000, 3 * GIB),
        name if name.starts_with("pc-q35-") => (0xb000_0000, 2 * GIB),
        name if name.starts_with("pc-i440fx-") => (0xe000_0000, 3 * GIB),
        name => return Err(format!("where the memory of a machine `{name}` is, is not known")),
    };
    Ok(PcMemory { blocks, below_4g: if bytes >= least { gap } else { least } })
}

/// The bounds of the pages that the helper can name in a guest with so much base memory. Memory
/// that is plugged has no place here, but a helper that names it tells no lie. QEMU puts it behind
/// the base memory and above 4 GiB, each piece at a whole GiB.
pub(super) fn limits(words: Words<'_>, base: u64) -> Limits {
    let memory = words.last("m");
    let option = |name: &str| memory.and_then(|memory| memory.get(name));
    let most = option("maxmem").and_then(|most| bytes(&most, MIB)).filter(|most| *most > base);
    let Some(most) = most else { return guest_port::limits(base) };
    let slots: u64 = option("slots").and_then(|slots| slots.parse().ok()).unwrap_or(0);
    let mut limits = guest_port::limits(most);
    let apart = 4 * GIB + (slots.min(SLOTS_MAX) + 1) * GIB;
    limits.end_page = limits.end_page.saturating_add(apart / PAGE_BYTES);
    limits
}

impl PcMemory {
    /// The size of all blocks together.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.iter().map(|(_, bytes)| bytes).sum()
    }
}

fn machine(words: Words<'_>) -> Option<Argument<'_>> {
    words.last("machine").or_else(|| words.last("M"))
}

/// The blocks of the base memory, in order.
fn blocks(words: Words<'_>) -> Option<Vec<(String, u64)>> {
    let of_object = |id: &str| {
        let object = words.all("object").find(|one| one.get("id").as_deref() == Some(id))?;
        Some((id.to_owned(), bytes(&object.get("size")?, 1)?))
    };
    let mut nodes: Vec<(u32, String)> = Vec::new();
    let is_node =
        |one: &Argument<'_>| one.get("type").or_else(|| one.first()).as_deref() == Some("node");
    for node in words.all("numa").filter(is_node) {
        if let Some(device) = node.get("memdev") {
            let number = node.get("nodeid").and_then(|id| id.parse().ok());
            nodes.push((number.unwrap_or(u32::try_from(nodes.len()).ok()?), device));
        }
    }
    nodes.sort();
    if !nodes.is_empty() {
        return nodes.iter().map(|(_, id)| of_object(id)).collect();
    }
    if let Some(id) = machine(words).and_then(|machine| machine.get("memory-backend")) {
        return Some(vec![of_object(&id)?]);
    }
    let memory = words.last("m")?;
    let size = memory.get("size").or_else(|| memory.first())?;
    Some(vec![("pc.ram".to_owned(), bytes(&size, MIB)?)])
}

/// A size in QEMU's syntax; without a suffix it counts in `unit`.
fn bytes(text: &str, unit: u64) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' | b'm' => (&text[..text.len() - 1], MIB),
        b'G' | b'g' => (&text[..text.len() - 1], GIB),
        b'T' | b't' => (&text[..text.len() - 1], 1 << 40),
        _ => (text, unit),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn of_line(line: &str) -> Result<PcMemory, String> {
        of(Words(&words(line)))
    }

    #[test]
    fn plugged_memory_is_within_the_limits() {
        let bounds = |line: &str| limits(Words(&words(line)), GIB);
        let plugged = bounds("qemu -M q35 -m size=1G,slots=4,maxmem=16G");
        // From 4 GiB on, with room to put each piece at a whole GiB.
        assert!(plugged.end_page * PAGE_BYTES >= (4 + 15 + 4) * GIB, "{plugged:?}");
        assert_eq!(plugged.ram_pages * PAGE_BYTES, 16 * GIB);
        for line in ["qemu -m 1G", "qemu -m 1G,slots=2,maxmem=1G", "qemu -m 1G,maxmem=x", "qemu"] {
            assert_eq!(bounds(line), guest_port::limits(GIB), "{line}");
        }
    }

    #[test]
    fn memory_is_where_the_machine_puts_it() {
        let blocks = |blocks: &[(&str, u64)]| -> Vec<(String, u64)> {
            blocks.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect()
        };
        for (line, expected, below_4g) in [
            ("qemu -M q35 -m 256", blocks(&[("pc.ram", 256 * MIB)]), 0xb000_0000),
            ("qemu -machine pc -m size=4G,slots=2", blocks(&[("pc.ram", 4 * GIB)]), 3 * GIB),
            (
                "qemu -machine pc-q35-7.2,usb=off,memory-backend=pc.ram -m size=8388608k -object \
                 {\"qom-type\":\"memory-backend-memfd\",\"id\":\"pc.ram\",\"size\":8589934592}",
                blocks(&[("pc.ram", 8 * GIB)]),
                2 * GIB,
            ),
            (
                "qemu -machine pc-i440fx-9.0 -m 1G -object memory-backend-ram,id=b,size=512M \
                 -object memory-backend-ram,size=512M,id=a -numa node,nodeid=1,memdev=b -numa \
                 node,nodeid=0,memdev=a -numa dist,src=0,dst=1,val=20",
                blocks(&[("a", 512 * MIB), ("b", 512 * MIB)]),
                0xe000_0000,
            ),
        ] {
            assert_eq!(of_line(line), Ok(PcMemory { blocks: expected, below_4g }), "{line}");
        }
        for line in [
            "qemu -m 256",
            "qemu -M microvm -m 256",
            "qemu -M q35",
            "qemu -M q35 -m 9999999999999T",
            "qemu -M q35,max-ram-below-4g=1G -m 256",
            "qemu -M q35,memory-backend=a -m 256",
        ] {
            assert!(of_line(line).is_err(), "{line}");
        }
    }
}
