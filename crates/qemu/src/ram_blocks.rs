//! Where the guest's RAM is in QEMU's memory.

use std::sync::Arc;

use ram::Mapping;
use serde_json::{Value, json};

use crate::machine::Machine;
use crate::process::Process;
use crate::qmp::{Qmp, QmpError};

/// A RAM block of the guest that is accessible in QEMU's memory.
#[derive(Clone, Debug)]
pub struct Reached {
    /// QEMU's name for it.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Its memory.
    pub mapping: Arc<Mapping>,
    /// Whether parts of it may be unplugged, which QEMU never reads: a virtio-mem device's.
    pub may_be_unplugged: bool,
}

/// The blocks that can be reached, and why others can't.
#[derive(Clone, Debug, Default)]
pub struct RamBlocks {
    /// Large, writable blocks.
    pub reached: Vec<Reached>,
    /// Sentences for an operator.
    pub notes: Vec<String>,
}

/// A line of QEMU's block list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Listed {
    name: String,
    bytes: u64,
    /// Its address, which QEMU before 8.0 doesn't report.
    address: Option<u64>,
    writable: bool,
}

impl RamBlocks {
    /// Smaller blocks are firmware, tables and video memory. They are sent in
    /// QEMU's own stream: they have a few MiB, and QEMU has to notice that they
    /// change.
    pub const BYTES_MIN: u64 = 24 << 20;

    /// Finds the blocks of a QEMU. Blocks that can't be reached are noted, and get
    /// their pages through QEMU's stream.
    #[must_use]
    pub fn of(machine: &Machine) -> Self {
        let mut blocks = Self::default();
        let listed = match list(&machine.qmp) {
            Ok(listed) => listed,
            Err(error) => {
                blocks.notes.push(format!("QEMU doesn't report where its RAM is: {error}"));
                return blocks;
            }
        };
        for block in listed.into_iter().filter(|block| block.bytes >= Self::BYTES_MIN) {
            blocks.reach(&machine.process, block);
        }
        let devices = machine.qmp.execute("query-memory-devices", json!({})).ok();
        let virtio_mem = devices.map(|devices| memory_of_virtio_mem(&devices));
        for block in &mut blocks.reached {
            // Without an answer, any may be.
            block.may_be_unplugged =
                virtio_mem.as_ref().is_none_or(|memory| is_among(&block.name, memory));
        }
        blocks
    }

    /// The block with that name, if it can be reached and has that size.
    #[must_use]
    pub fn mapping(&self, name: &str, bytes: u64) -> Option<Arc<Mapping>> {
        let block = self.reached.iter().find(|block| block.name == name)?;
        (block.bytes == bytes).then(|| Arc::clone(&block.mapping))
    }

    fn reach(&mut self, process: &Process, block: Listed) {
        let Listed { name, bytes, address, writable } = block;
        if !writable {
            return;
        }
        let mapping = match address {
            Some(address) => Mapping::of_process(process.pidfd(), process.pid(), address, bytes)
                .map_err(|error| error.to_string()),
            None => Err("this QEMU reports only where its first block is".to_owned()),
        };
        match mapping {
            Ok(mapping) => self.reached.push(Reached {
                name,
                bytes,
                mapping: Arc::new(mapping),
                may_be_unplugged: false,
            }),
            Err(why) => self.notes.push(format!("RAM `{name}` is placed inline: {why}")),
        }
    }
}

/// QEMU's block list. The commands' output is for people, so text that can't be
/// parsed is no error: those blocks are placed inline.
fn list(qmp: &Qmp) -> Result<Vec<Listed>, QmpError> {
    let answer = qmp.execute("x-query-ramblock", json!({}))?;
    let text = answer["human-readable-text"].as_str().unwrap_or_default();
    let mut listed: Vec<_> = text.lines().filter_map(line).collect();
    if listed.iter().all(|block| block.address.is_none()) {
        // On all x86 machines, guest address 0 is the first byte of its block.
        let command = json!({ "command-line": "gpa2hva 0" });
        let answer = qmp.execute("human-monitor-command", command)?;
        if let Some((name, address)) = first(answer.as_str().unwrap_or_default()) {
            for block in listed.iter_mut().filter(|block| block.name == name) {
                block.address = Some(address);
            }
        }
    }
    Ok(listed)
}

/// Parses `NAME  4 KiB  OFFSET  USED  TOTAL`, and since 8.0 `ADDRESS  rw`.
fn line(line: &str) -> Option<Listed> {
    let words: Vec<_> = line.split_whitespace().collect();
    let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let unit = words.iter().position(|word| matches!(*word, "KiB" | "MiB" | "GiB" | "B"))?;
    let name = words.get(..unit.checked_sub(1)?)?.join(" ");
    let [_, used, _, rest @ ..] = words.get(unit + 1..)? else { return None };
    Some(Listed {
        name,
        bytes: hex(used)?,
        address: rest.first().and_then(|word| hex(word)),
        writable: rest.get(1).is_none_or(|word| *word == "rw"),
    })
}

/// The ids of the backends of virtio-mem devices, from QEMU's list of memory devices.
fn memory_of_virtio_mem(devices: &Value) -> Vec<String> {
    let devices = devices.as_array().into_iter().flatten();
    let memory = devices.filter(|device| device["type"] == "virtio-mem").filter_map(|device| {
        let path = device["data"]["memdev"].as_str()?;
        Some(path.rsplit('/').next()?.to_owned())
    });
    memory.collect()
}

/// Whether a block is the memory of one of these backends. A device on a bus puts its path in
/// front of the backend's id, and old machine types put `/objects` there.
fn is_among(block: &str, backends: &[String]) -> bool {
    block.rsplit('/').next().is_some_and(|id| backends.iter().any(|backend| backend == id))
}

/// Parses `Host virtual address for 0x0 (NAME) is ADDRESS`.
fn first(text: &str) -> Option<(String, u64)> {
    let (_, rest) = text.split_once('(')?;
    let (name, rest) = rest.split_once(')')?;
    let address = rest.split_whitespace().last()?.strip_prefix("0x")?;
    Some((name.to_owned(), u64::from_str_radix(address, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_old_and_new_versions_are_understood() {
        let old = "  pc.ram    4 KiB  0x0000000000000000 0x0000000110000000 0x0000000110000000";
        let expected = Listed {
            name: "pc.ram".to_owned(),
            bytes: 0x1_1000_0000,
            address: None,
            writable: true,
        };
        assert_eq!(line(old), Some(expected.clone()));
        let new = format!("{old} 0x00007feec3e00000  rw");
        let address = Some(0x7fee_c3e0_0000);
        assert_eq!(line(&new), Some(Listed { address, ..expected.clone() }));
        let rom = format!("{old} 0x00007feec3e00000  ro");
        assert_eq!(line(&rom), Some(Listed { address, writable: false, ..expected }));
        let title = "Block Name    PSize              Offset               Used              Total";
        assert_eq!(line(title), None);
        for nonsense in ["", "KiB", "4 KiB 1 2 3", "a 4 KiB 0x1"] {
            assert_eq!(line(nonsense), None, "{nonsense}");
        }
    }

    /// As QEMU 7.2 answers.
    #[test]
    fn blocks_of_virtio_mem_devices_are_told_by_their_backends() {
        let devices = json!([
            {"type": "dimm", "data": {"memdev": "/objects/m", "addr": 4_294_967_296_u64,
                "size": 134_217_728, "slot": 0, "node": 0, "hotplugged": false,
                "hotpluggable": true, "id": "d"}},
            {"type": "virtio-mem", "data": {"memdev": "/objects/vm0", "memaddr": 4_429_185_024_u64,
                "block-size": 2_097_152, "size": 0, "node": 0, "max-size": 536_870_912,
                "requested-size": 0, "id": "m0"}}
        ]);
        let memory = memory_of_virtio_mem(&devices);
        assert_eq!(memory, ["vm0"]);
        for (block, is_one) in [
            ("0000:00:01.0/vm0", true),
            ("/objects/vm0", true),
            ("vm0", true),
            ("m", false),
            ("pc.ram", false),
            ("vm0/a", false),
        ] {
            assert_eq!(is_among(block, &memory), is_one, "{block}");
        }
        assert!(memory_of_virtio_mem(&json!({})).is_empty());
    }

    #[test]
    fn the_first_blocks_address_is_found_in_the_monitors_words() {
        let text = "Host virtual address for 0x0 (pc.ram) is 0x7fa427e00000\r\n";
        assert_eq!(first(text), Some(("pc.ram".to_owned(), 0x7fa4_27e0_0000)));
        assert_eq!(first("No memory is mapped at address 0x0"), None);
    }
}
