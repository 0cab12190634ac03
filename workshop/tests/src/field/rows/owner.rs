//! What the owner of a VM does by QMP.

use std::time::{Duration, Instant};

use qemu::qmp::Event;
use serde_json::json;

use super::commands::{awaits, command, execute};
use super::inside::CARD;
use super::plugged::{PLUG, medium_file};
use crate::MIB;
use crate::field::{Done, Field, SHOWS_MAX};

const STANDSTILL: Duration = Duration::from_secs(5);

pub(super) fn owners_commands(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    for command in ["query-status", "query-block", "query-pci", "query-migrate", "query-cpus-fast"]
    {
        execute(&qmp, command, json!({}))?;
    }
    let registers = json!({ "command-line": "info registers" });
    execute(&qmp, "human-monitor-command", registers)?;
    let announced = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
    execute(&qmp, "announce-self", announced)?;
    execute(&qmp, "stop", json!({}))?;
    execute(&qmp, "cont", json!({}))?;
    Ok(String::new())
}

pub(super) fn link_down_and_up(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    execute(&qmp, "set_link", json!({ "name": "outside", "up": false }))?;
    let carrier = |field: &Field, what: &str| {
        field.sh(&format!("{CARD}; cat /sys/class/net/$c/carrier")).is_ok_and(|it| it == what)
    };
    field.shows("the guest's link is down", |field| carrier(field, "0"))?;
    execute(&qmp, "set_link", json!({ "name": "outside", "up": true }))?;
    field.shows("the guest's link is up", |field| carrier(field, "1"))?;
    Ok(String::new())
}

pub(super) fn balloon(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    let now = || {
        let known = execute(&qmp, "query-balloon", json!({}));
        known.ok().and_then(|it| it["actual"].as_u64()).unwrap_or_default()
    };
    let all = now();
    let less = all - 64 * MIB;
    execute(&qmp, "balloon", json!({ "value": less }))?;
    field.shows("the guest gives memory back", |_| now() <= less + MIB)?;
    execute(&qmp, "balloon", json!({ "value": all }))?;
    field.shows("the guest has all of its memory again", |_| now() == all)?;
    Ok(String::new())
}

pub(super) fn disk_resized(field: &mut Field) -> Done {
    let size = 48 * MIB;
    command(field, "block_resize", json!({ "device": "data", "size": size }))?;
    field.shows("the guest sees the new size", |field| {
        field.sh("blockdev --getsize64 /dev/vdb").is_ok_and(|it| it == size.to_string())
    })?;
    Ok(String::new())
}

pub(super) fn snapshot(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    // The image below this one is every test's.
    let [path, base] = ["files-snapshot", "files-root"].map(|name| field.shared(name).1);
    let taken = json!({ "device": "root", "snapshot-file": path, "format": "qcow2" });
    execute(&qmp, "blockdev-snapshot-sync", taken)?;
    field.sh("head -c 2M /dev/urandom >/var/tmp/more && sync && rm /var/tmp/more")?;
    let of_job = |name: &'static str| {
        move |event: &Event| event.name == name && event.data["device"] == PLUG
    };
    awaits(field, &qmp, of_job("BLOCK_JOB_READY"), |_| {
        let commit = json!({ "job-id": PLUG, "device": "root", "base": base });
        execute(&qmp, "block-commit", commit).map(drop)
    })?;
    let ended = awaits(field, &qmp, of_job("BLOCK_JOB_COMPLETED"), |_| {
        execute(&qmp, "block-job-complete", json!({ "device": PLUG })).map(drop)
    })?;
    if ended.data["error"].is_null() { Ok(String::new()) } else { Err(ended.data.to_string()) }
}

pub(super) fn medium(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    for mark in ["first", "second"] {
        let (_, path) = medium_file(field, mark, mark)?;
        let medium = json!({ "id": "cd", "filename": path, "format": "raw", "force": true });
        execute(&qmp, "blockdev-change-medium", medium)?;
        field.shows("the guest reads the medium", |field| {
            let read =
                format!("dd if=/dev/sr0 bs=2048 count=1 2>/dev/null | head -c {}", mark.len());
            field.sh(&read).is_ok_and(|it| it == mark)
        })?;
    }
    execute(&qmp, "eject", json!({ "id": "cd", "force": true }))?;
    Ok(String::new())
}

/// The guest's clock lags afterwards, unless something in the guest sets it: that is documented.
pub(super) fn standstill(field: &mut Field) -> Done {
    let clock = |field: &Field| -> Result<f64, String> {
        field.sh("date +%s.%N")?.parse().map_err(|_| "the guest's clock".to_owned())
    };
    let (before, started) = (clock(field)?, Instant::now());
    let qmp = field.qmp()?;
    execute(&qmp, "stop", json!({}))?;
    std::thread::sleep(STANDSTILL);
    execute(&qmp, "cont", json!({}))?;
    let lag = started.elapsed().as_secs_f64() - (clock(field)? - before);
    Ok(format!("the guest's clock is {lag:.0} s late"))
}

pub(super) fn suspend(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    let is =
        |what: &str| execute(&qmp, "query-status", json!({})).is_ok_and(|it| it["status"] == what);
    field.sh_later("systemctl suspend")?;
    field.shows("the guest is suspended", |_| is("suspended"))?;
    execute(&qmp, "system_wakeup", json!({}))?;
    field.shows("QEMU has woken the guest", |_| is("running"))?;
    // Until the guest has set its serial port up again, a question is lost.
    field.guest().wait_beat(SHOWS_MAX).map_err(|error| error.to_string())?;
    Ok(String::new())
}
