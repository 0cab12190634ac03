//! VMs whose disk is written as a guest would write it, without a guest.

use std::path::Path;
use std::time::Duration;

use crossbeam_channel::Receiver;
use qemu::machine::{By, Machine, Start};
use qemu::qmp::Event;
use serde_json::{Value, json};

/// How long to wait for an event.
const PATIENCE: Duration = Duration::from_secs(60);

/// A VM with a disk, `disk0`, that ends with the test.
pub(crate) struct Vm {
    machine: Machine,
    image: String,
    format: String,
    events: Receiver<Event>,
}

impl Vm {
    /// Starts it with a disk of that format. It never runs a guest.
    pub(crate) fn start(dir: &Path, image: &str, format: &str, incoming: bool) -> Self {
        let qemu = std::env::var("DROVEWAY_QEMU");
        let qemu = qemu.unwrap_or_else(|_| "qemu-system-x86_64".to_owned());
        // "ignore" is QEMU's default.
        let discard = if incoming { "ignore" } else { "unmap" };
        let arguments = format!(
            "-machine q35 -m 64 -S -nodefaults -display none -accel tcg \
             -blockdev driver=file,filename={image},node-name=file0,discard={discard} \
             -blockdev driver={format},file=file0,node-name=disk0,discard={discard} \
             -device virtio-blk-pci,drive=disk0,id=vda"
        );
        let argv: Vec<String> = qemu
            .split_whitespace()
            .chain(arguments.split_whitespace())
            .map(str::to_owned)
            .collect();
        let home = dir.join(if incoming { "destination" } else { "source" });
        let start = Start {
            name: "test",
            argv: &argv,
            cwd: dir,
            dir: &home,
            incoming,
            machine: None,
            by: By::Operator,
            user: None,
            guest_port: qemu::machine::GuestPort::None,
            knows_legacy_ack: false,
            up_max: qemu::machine::UP_MAX,
            idle_max: qemu::machine::UP_MAX,
        };
        let machine = qemu::machine::start(&start).unwrap();
        let events = machine.qmp.events();
        Self { machine, image: image.to_owned(), format: format.to_owned(), events }
    }

    pub(crate) fn qmp(&self, command: &str, arguments: Value) -> Value {
        self.machine.qmp.execute(command, arguments).unwrap()
    }

    /// Does what a guest would do: runs a qemu-io command through the guest's device.
    pub(crate) fn guest(&self, does: &str) {
        let line = format!("qemu-io -d /machine/peripheral/vda/virtio-backend \"{does}\"");
        let said = self.qmp("human-monitor-command", json!({ "command-line": line }));
        let said = said.as_str().unwrap();
        assert!(!said.to_lowercase().contains("fail") && !said.contains("rror"), "{does}: {said}");
    }

    /// Mirrors the disk to an export.
    pub(crate) fn mirror(&self, socket: &Path, export: &str, discard: &str, copy_mode: &str) {
        let server = json!({ "type": "unix", "path": socket });
        self.qmp(
            "blockdev-add",
            json!({ "driver": "nbd", "node-name": "tgt", "server": server, "export": export,
                    "discard": discard }),
        );
        self.qmp(
            "blockdev-mirror",
            json!({ "job-id": "m0", "device": "disk0", "target": "tgt", "sync": "full",
                    "copy-mode": copy_mode }),
        );
    }

    pub(crate) fn wait_ready(&self) {
        self.wait("BLOCK_JOB_READY");
    }

    /// Ends the mirror in order, once the target has everything.
    pub(crate) fn drain(&self) {
        self.qmp("block-job-cancel", json!({ "device": "m0" }));
        let ended = self.wait("BLOCK_JOB_COMPLETED");
        assert!(ended.data.get("error").is_none(), "{:?}", ended.data);
        self.qmp("blockdev-del", json!({ "node-name": "tgt" }));
    }

    pub(crate) fn wait(&self, name: &str) -> Event {
        loop {
            let event = self.events.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no {name}"));
            if event.name == name {
                return event;
            }
        }
    }

    /// Opens a writable export of the image through nodes of its own: the guest's nodes
    /// don't keep holes, and this way they stay inactive until the VM runs.
    pub(crate) fn export(&self, socket: &Path, name: &str) {
        let file = json!({ "driver": "file", "filename": self.image, "discard": "unmap" });
        self.qmp(
            "blockdev-add",
            json!({ "driver": self.format, "node-name": "sink", "discard": "unmap", "file": file }),
        );
        let address = json!({ "type": "unix", "data": { "path": socket } });
        self.qmp("nbd-server-start", json!({ "addr": address }));
        self.qmp(
            "block-export-add",
            json!({ "type": "nbd", "id": "x0", "node-name": "sink", "name": name, "writable": true }),
        );
    }

    /// Closes the export.
    pub(crate) fn stop_export(&self) {
        self.qmp("nbd-server-stop", json!({}));
        while self.qmp("query-block-exports", json!({})) != json!([]) {
            self.wait("BLOCK_EXPORT_DELETED");
        }
        self.qmp("blockdev-del", json!({ "node-name": "sink" }));
    }

    pub(crate) fn quit(self) {
        self.machine.quit().unwrap();
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Err(error) = self.machine.quit() {
            eprintln!("a test's QEMU stays behind: {error}");
        }
    }
}
