//! Commands to a VM's QEMU, and the events that they lead to.

use std::time::Instant;

use qemu::qmp::{Event, Qmp};
use serde_json::Value;

use crate::field::{Done, Field, SHOWS_MAX};

/// What is written by a guest, and read outside of it, or there again.
pub(super) const MARK: &str = "field-mark";

pub(super) fn execute(qmp: &Qmp, command: &str, arguments: Value) -> Result<Value, String> {
    qmp.execute(command, arguments).map_err(|error| format!("{command}: {error}"))
}

/// A command that is all that is done.
pub(super) fn command(field: &Field, command: &str, arguments: Value) -> Done {
    execute(&*field.qmp()?, command, arguments).map(|_| String::new())
}

/// Does something after which QEMU sends an event.
pub(super) fn awaits(
    field: &Field,
    qmp: &Qmp,
    is_it: impl Fn(&Event) -> bool,
    act: impl FnOnce(&Field) -> Result<(), String>,
) -> Result<Event, String> {
    let events = qmp.events();
    act(field)?;
    let end = Instant::now() + SHOWS_MAX;
    loop {
        let event = events.recv_deadline(end).map_err(|_| "QEMU sends no event".to_owned())?;
        if is_it(&event) {
            return Ok(event);
        }
    }
}
