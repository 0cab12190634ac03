//! Copy of a disk by QEMU's own means: a mirror at the source that writes to an NBD export of the
//! destination, over TCP.
//!
//! The disk is copied first, then the memory. Both at once would need as many bytes on the same
//! link, which either alone fills; and QEMU stops a VM whose memory has arrived, whether its disk
//! has or not.

use std::fs::{self, File};
use std::net::IpAddr;

use serde_json::json;

use super::{End, Events, Failure};
use crate::image;
use lab::error::{FileContext, LabError, Result};
use lab::hosts::Hosts;

const PORT: u16 = 7812;
/// Bytes in flight: QEMU's 16 MiB are few for a long link. The same as Droveway's.
const BUFFER_BYTES: u64 = 64 << 20;
/// Unit of dirty tracking: with QEMU's 64 KiB, small writes are copied sixteen times over. The same
/// as Droveway's.
const GRANULARITY: u64 = 4 << 10;
/// Name of the mirror job and of the node that it writes to.
const JOB: &str = "copy";

/// Makes the image on host b that host a's disk is copied to.
pub(super) fn make_room(hosts: &Hosts) -> Result<()> {
    let [from, to] = [&hosts.a, &hosts.b].map(|host| host.run_dir.join(image::FILE));
    let bytes = fs::metadata(&from).at("look at", &from)?.len();
    let file = File::create_new(&to).at("make", &to)?;
    file.set_len(bytes).at("make", &to)
}

/// Has the destination's QEMU export its disk for writing.
pub(super) fn export(there: &End, address: IpAddr) -> Result<()> {
    let server = json!({ "type": "inet", "data": place(address) });
    there.tell("nbd-server-start", json!({ "addr": server }))?;
    let export = json!({
        "type": "nbd",
        "id": JOB,
        "name": JOB,
        "node-name": image::NODE,
        "writable": true,
    });
    there.tell("block-export-add", export).map(drop)
}

/// Starts the copy.
pub(super) fn begin(here: &End, address: IpAddr) -> Result<()> {
    let mut server = place(address);
    server["type"] = "inet".into();
    let target = json!({
        "driver": "nbd",
        "node-name": JOB,
        "server": server,
        "export": JOB,
        // Holes stay holes, and written zeros become holes, as with Droveway.
        "discard": "unmap",
        "detect-zeroes": "unmap",
    });
    here.tell("blockdev-add", target)?;
    let mirror = json!({
        "job-id": JOB,
        "device": image::NODE,
        "target": JOB,
        "sync": "full",
        "copy-mode": "background",
        "buf-size": BUFFER_BYTES,
        "granularity": GRANULARITY,
    });
    here.tell("blockdev-mirror", mirror).map(drop)
}

fn place(address: IpAddr) -> serde_json::Value {
    json!({ "host": address.to_string(), "port": PORT.to_string() })
}

/// Waits until everything was copied once.
pub(super) fn wait_ready(leaving: &Events) -> std::result::Result<(), Failure> {
    let told =
        leaving.wait(|event| ["BLOCK_JOB_READY", "BLOCK_JOB_COMPLETED"].contains(&&*event.name))?;
    if told.name == "BLOCK_JOB_READY" {
        return Ok(());
    }
    Err(Failure::Other(format!("the mirror failed: {}", told.data)))
}

/// While the VM is stopped: has the rest copied, and only then continues the migration.
pub(super) fn finish(
    here: &End,
    there: &End,
    leaving: &Events,
) -> std::result::Result<(), Failure> {
    let words = |error: LabError| Failure::Other(error.to_string());
    leaving.wait(|event| event.name == "MIGRATION" && event.data["status"] == "pre-switchover")?;
    here.tell("block-job-cancel", json!({ "device": JOB })).map_err(words)?;
    let ended = leaving.wait(|event| event.name == "BLOCK_JOB_COMPLETED")?;
    if let Some(error) = ended.data.get("error") {
        return Err(Failure::Other(format!("the mirror failed: {error}")));
    }
    there.tell("nbd-server-stop", json!({})).map_err(words)?;
    here.tell("migrate-continue", json!({ "state": "pre-switchover" })).map_err(words)?;
    Ok(())
}
