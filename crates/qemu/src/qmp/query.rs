//! Queries with typed answers.

use std::time::Duration;

use facts::shape::Memory;
use serde_json::{Value, json};

use super::{Qmp, QmpError, TIMEOUT};

/// The VM's run state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// The vCPUs run.
    Running,
    /// Stopped by a person or a program; after an incoming migration under
    /// `-S`: loaded.
    Paused,
    /// Never ran: started with `-S`.
    Prelaunch,
    /// Waits for, or receives, a migration.
    InMigrate,
    /// Stopped: its last pages and device state are being sent.
    FinishMigrate,
    /// Stopped: its migration was sent completely.
    PostMigrate,
    /// The guest powered off, and QEMU was ordered to stay.
    Shutdown,
    /// The guest sleeps.
    Suspended,
    /// Stopped by a disk error.
    IoError,
    /// Any other, as QEMU calls it.
    Other(String),
}

impl RunState {
    fn parse(status: &str) -> Self {
        match status {
            "running" => Self::Running,
            "paused" => Self::Paused,
            "prelaunch" => Self::Prelaunch,
            "inmigrate" => Self::InMigrate,
            "finish-migrate" => Self::FinishMigrate,
            "postmigrate" => Self::PostMigrate,
            "shutdown" => Self::Shutdown,
            "suspended" => Self::Suspended,
            "io-error" => Self::IoError,
            other => Self::Other(other.to_owned()),
        }
    }
}

impl std::fmt::Display for RunState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Prelaunch => "prelaunch",
            Self::InMigrate => "inmigrate",
            Self::FinishMigrate => "finish-migrate",
            Self::PostMigrate => "postmigrate",
            Self::Shutdown => "shutdown",
            Self::Suspended => "suspended",
            Self::IoError => "io-error",
            Self::Other(name) => name,
        })
    }
}

/// One memory backend object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBackend {
    /// Its id; empty if QEMU created it without one.
    pub id: String,
    /// Its size.
    pub bytes: u64,
    /// Whether it is mapped shared.
    pub share: bool,
}

impl Qmp {
    /// The VM's current run state.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn run_state(&self) -> Result<RunState, QmpError> {
        self.run_state_within(TIMEOUT)
    }

    /// The same, with another limit for QEMU's answer.
    ///
    /// # Errors
    /// If QEMU doesn't answer in time.
    pub fn run_state_within(&self, timeout: Duration) -> Result<RunState, QmpError> {
        let answer = self.execute_within("query-status", json!({}), timeout)?;
        let status = answer["status"].as_str().ok_or_else(|| odd("query-status", &answer))?;
        Ok(RunState::parse(status))
    }

    /// The host's threads of the VM's vCPUs.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn vcpus(&self) -> Result<Vec<u32>, QmpError> {
        let answer = self.execute("query-cpus-fast", json!({}))?;
        list(&answer, "query-cpus-fast", |one| u32::try_from(one["thread-id"].as_u64()?).ok())
    }

    /// The process that the vCPUs' threads belong to, if it is visible to the
    /// agent. Unlike [`Qmp::peer_pid`] it is right whichever program created the
    /// socket, but only if QEMU is in the agent's PID namespace: the caller must
    /// check that the process is this QEMU.
    pub(crate) fn process_of_vcpu(&self) -> Option<u32> {
        let thread = *self.vcpus().ok()?.first()?;
        let status = std::fs::read_to_string(crate::process::proc_path(thread, "status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
    }

    /// Guest RAM: what the VM started with and what was plugged in since.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn ram_bytes(&self) -> Result<u64, QmpError> {
        self.ram_bytes_within(TIMEOUT)
    }

    /// The same, with another limit for QEMU's answer.
    ///
    /// # Errors
    /// If QEMU doesn't answer in time.
    pub fn ram_bytes_within(&self, timeout: Duration) -> Result<u64, QmpError> {
        let answer = self.execute_within("query-memory-size-summary", json!({}), timeout)?;
        let base = answer["base-memory"]
            .as_u64()
            .ok_or_else(|| odd("query-memory-size-summary", &answer))?;
        Ok(base.saturating_add(answer["plugged-memory"].as_u64().unwrap_or(0)))
    }

    /// The VM's memory backends.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn memory_backends(&self) -> Result<Vec<MemoryBackend>, QmpError> {
        let answer = self.execute("query-memdev", json!({}))?;
        let backend = |one: &Value| {
            Some(MemoryBackend {
                id: one["id"].as_str().unwrap_or_default().to_owned(),
                bytes: one["size"].as_u64()?,
                share: one["share"].as_bool().unwrap_or(false),
            })
        };
        list(&answer, "query-memdev", backend)
    }

    /// The bytes that virtio-mem devices have not plugged and are not to plug, by the ids of their
    /// backends. QEMU leaves these untouched.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn unplugged(&self) -> Result<Vec<Memory>, QmpError> {
        Ok(unplugged(&self.execute("query-memory-devices", json!({}))?))
    }

    /// The VM's memory backends without what is unplugged of them; all of it counts as plugged if
    /// QEMU doesn't report it.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn plugged_backends(&self) -> Result<Vec<MemoryBackend>, QmpError> {
        let mut backends = self.memory_backends()?;
        let unplugged = self.unplugged().unwrap_or_default();
        for backend in &mut backends {
            let less = Memory::bytes_of(&unplugged, &backend.id);
            backend.bytes = backend.bytes.saturating_sub(less);
        }
        Ok(backends)
    }

    /// Starts or resumes the vCPUs.
    ///
    /// # Errors
    /// If QEMU can't, such as when an image is locked by another QEMU.
    pub fn cont(&self) -> Result<(), QmpError> {
        self.execute("cont", json!({})).map(drop)
    }

    /// Stops the vCPUs.
    ///
    /// # Errors
    /// If QEMU doesn't.
    pub fn stop(&self) -> Result<(), QmpError> {
        self.execute("stop", json!({})).map(drop)
    }
}

/// What is unplugged, from QEMU's list of memory devices. Other devices than virtio-mem have all of
/// their memory plugged.
fn unplugged(devices: &Value) -> Vec<Memory> {
    let devices = devices.as_array().into_iter().flatten();
    let of = |device: &Value| {
        let data = &device["data"];
        let id = data["memdev"].as_str()?.rsplit('/').next()?.to_owned();
        // The guest may plug as much as is requested at any time.
        let plugged = data["size"].as_u64()?.max(data["requested-size"].as_u64()?);
        Some(Memory { id, bytes: data["max-size"].as_u64()?.saturating_sub(plugged) })
    };
    devices.filter(|device| device["type"] == "virtio-mem").filter_map(of).collect()
}

/// Parses an answer that must be a list, each of whose items `item` accepts.
pub(crate) fn list<T>(
    answer: &Value,
    command: &str,
    item: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<T>, QmpError> {
    let items = answer.as_array().ok_or_else(|| odd(command, answer))?;
    items.iter().map(|one| item(one).ok_or_else(|| odd(command, one))).collect()
}

pub(crate) fn odd(command: &str, answer: &Value) -> QmpError {
    let shown: String = answer.to_string().chars().take(200).collect();
    QmpError::Garbage(format!("{command} answered {shown}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::played::played;

    const MIB: u64 = 1 << 20;

    fn virtio_mem(id: &str, plugged: u64, requested: u64, most: u64) -> Value {
        let data = json!({"memdev": format!("/objects/{id}"), "memaddr": 4_429_185_024_u64,
            "block-size": 2 * MIB, "size": plugged * MIB, "node": 0, "max-size": most * MIB,
            "requested-size": requested * MIB, "id": "m0"});
        json!({"type": "virtio-mem", "data": data})
    }

    fn memory(id: &str, mib: u64) -> Memory {
        Memory { id: id.to_owned(), bytes: mib * MIB }
    }

    /// As QEMU 7.2 and newer answer.
    #[test]
    fn only_virtio_mem_devices_have_unplugged_memory() {
        let dimm = json!({"memdev": "/objects/m", "addr": 4_294_967_296_u64, "size": 128 * MIB,
            "slot": 0, "node": 0, "hotplugged": false, "hotpluggable": true, "id": "d"});
        let devices = json!([
            {"type": "dimm", "data": dimm},
            {"type": "nvdimm", "data": dimm},
            {"type": "virtio-pmem", "data": {"memaddr": 0, "size": MIB, "memdev": "/objects/p"}},
            {"type": "sgx-epc", "data": {"memaddr": 0, "size": MIB, "memdev": "/objects/s"}},
            {"type": "hv-balloon", "data": {"max-size": MIB}},
            virtio_mem("none", 0, 0, 512),
            virtio_mem("asked", 0, 128, 512),
            virtio_mem("shrinks", 256, 128, 512),
            virtio_mem("all", 512, 512, 512),
            {"type": "virtio-mem", "data": {"memdev": "/objects/odd", "max-size": MIB}},
            {"type": "virtio-mem"},
        ]);
        let expected =
            [memory("none", 512), memory("asked", 384), memory("shrinks", 256), memory("all", 0)];
        assert_eq!(unplugged(&devices), expected);
        for none in [json!([]), json!({}), json!(null)] {
            assert_eq!(unplugged(&none), [], "{none}");
        }
    }

    /// Each backend's size, where QEMU answers `said` about memory devices.
    fn plugged(said: fn() -> Option<Value>) -> Vec<u64> {
        let (_dir, qmp, player) = played(move |command| {
            let answer = match command["execute"].as_str() {
                Some("query-memdev") => Some(json!([
                    {"id": "vm0", "size": 512 * MIB, "share": true},
                    {"id": "m", "size": 64 * MIB, "share": false},
                ])),
                _ => said(),
            };
            let refusal = json!({"class": "CommandNotFound", "desc": "not here"});
            let (key, value) = answer.map_or(("error", refusal), |answer| ("return", answer));
            Some(format!("{}\n", json!({ key: value, "id": command["id"] })))
        });
        let sizes = qmp.unwrap().plugged_backends().unwrap();
        player.join().unwrap();
        sizes.into_iter().map(|backend| backend.bytes / MIB).collect()
    }

    /// A stopped VM waits for the answer.
    #[test]
    fn a_silent_qemu_is_waited_for_as_long_as_requested() {
        let (_dir, qmp, player) = played(|_| Some(String::new()));
        let (qmp, limit) = (qmp.unwrap(), Duration::from_millis(1));
        let late = qmp.run_state_within(limit).unwrap_err();
        assert!(matches!(late, QmpError::Timeout { waited, .. } if waited == limit), "{late}");
        drop(qmp);
        player.join().unwrap();
    }

    #[test]
    fn all_memory_counts_where_qemu_does_not_say_what_is_plugged() {
        assert_eq!(plugged(|| Some(json!([virtio_mem("vm0", 128, 0, 512)]))), [128, 64]);
        assert_eq!(plugged(|| Some(json!([]))), [512, 64]);
        assert_eq!(plugged(|| None), [512, 64]);
    }
}
