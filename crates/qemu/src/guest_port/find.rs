//! Which of a VM's ports is the helper's, and whether a client has it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::PORT_NAME;
use crate::qmp::{Qmp, QmpError};

/// Where QEMU keeps devices: those with an id and those without.
const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// A VM's port for the helper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its socket, as QEMU calls it; a relative path starts at QEMU's directory.
    pub socket: PathBuf,
    /// A client is connected to it. QEMU serves one at a time.
    pub taken: bool,
    /// A program in the guest has it open.
    pub open: bool,
}

/// Why there is no port for the helper that can be used.
#[derive(Debug, thiserror::Error)]
pub enum NoPort {
    /// No device has the name.
    #[error("the VM has no virtio-serial port named {PORT_NAME}")]
    Missing,
    /// The port can't be connected to.
    #[error(
        "the VM's port {PORT_NAME} leads to `{leads_to}`: to be queried it needs a chardev such as \
         socket,path=...,server=on,wait=off"
    )]
    Elsewhere {
        /// Where, as QEMU describes it.
        leads_to: String,
    },
    /// QEMU doesn't answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// Finds the port of a VM, the agent's or the owner's; takes no longer than `within`.
///
/// # Errors
/// If there is none, it can't be used, or QEMU doesn't answer.
pub fn find(qmp: &Qmp, within: Duration) -> Result<Port, NoPort> {
    let end = Instant::now() + within;
    let ask = |command: &str, arguments| {
        qmp.execute_within(command, arguments, end.saturating_duration_since(Instant::now()))
    };
    for container in DEVICES {
        let children = ask("qom-list", json!({ "path": container }))?;
        for name in children.as_array().into_iter().flatten().filter_map(port_child) {
            let path = format!("{container}/{name}");
            let get = |property| ask("qom-get", json!({ "path": path, "property": property }));
            if get("name")?.as_str() != Some(PORT_NAME) {
                continue;
            }
            let chardev = get("chardev")?;
            let chardevs = ask("query-chardev", json!({}))?;
            return port(&chardevs, chardev.as_str().unwrap_or_default());
        }
    }
    Err(NoPort::Missing)
}

fn port_child(child: &Value) -> Option<&str> {
    let is_port = child["type"].as_str()? == "child<virtserialport>";
    child["name"].as_str().filter(|_| is_port)
}

/// The port behind the chardev of this name.
fn port(chardevs: &Value, name: &str) -> Result<Port, NoPort> {
    let listed = chardevs.as_array().into_iter().flatten();
    let found = listed.into_iter().find(|one| one["label"].as_str() == Some(name));
    let Some(found) = found else {
        return Err(NoPort::Elsewhere { leads_to: name.to_owned() });
    };
    let leads_to = found["filename"].as_str().unwrap_or_default();
    let (taken, address) = match leads_to.strip_prefix("disconnected:") {
        Some(address) => (false, address),
        None => (true, leads_to),
    };
    // `,server=on`, or `,server` in older QEMUs.
    let socket = address
        .strip_prefix("unix:")
        .and_then(|rest| rest.strip_suffix(",server=on").or_else(|| rest.strip_suffix(",server")));
    let Some(socket) = socket.filter(|path| !path.is_empty()) else {
        return Err(NoPort::Elsewhere { leads_to: leads_to.to_owned() });
    };
    let open = found["frontend-open"].as_bool().unwrap_or(true);
    Ok(Port { socket: socket.into(), taken, open })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_what_can_be_connected_to() {
        let chardevs = json!([
            {"label": "free", "filename": "disconnected:unix:/run/a,b,server=on",
             "frontend-open": true},
            {"label": "had", "filename": "unix:/run/a,server=on", "frontend-open": false},
            {"label": "client", "filename": "unix:/run/a", "frontend-open": true},
            {"label": "tcp", "filename": "disconnected:tcp:0.0.0.0:1,server=on"},
            {"label": "odd"},
        ]);
        let of = |name| port(&chardevs, name).map_err(|error| error.to_string());
        let expected = |socket: &str, taken, open| Ok(Port { socket: socket.into(), taken, open });
        assert_eq!(of("free"), expected("/run/a,b", false, true));
        assert_eq!(of("had"), expected("/run/a", true, false));
        for name in ["client", "tcp", "odd", "none"] {
            assert!(of(name).unwrap_err().contains("leads to"), "{name}");
        }
        assert!(port(&json!(null), "free").is_err());
    }
}
