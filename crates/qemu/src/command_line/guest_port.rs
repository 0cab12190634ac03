//! Adds the port for the helper in the guest to a command line.

use std::os::fd::RawFd;

use cachemap::PORT_NAME;
use serde_json::Value;

use super::CommandLine;
use super::machine::pieces;

/// The id of the socket; the ids of the devices start with it.
pub(crate) const GUEST_ID: &str = "droveway-guest";

impl CommandLine {
    /// Whether it has a port for the helper already, which the owner has added.
    #[must_use]
    pub fn has_guest_port(&self) -> bool {
        let mut devices = self.arguments("device");
        devices.any(|device| value(device, "name").as_deref() == Some(PORT_NAME))
    }

    /// Whether a running QEMU was started with the port that
    /// [`CommandLine::with_guest_port`] adds. A port with the same ids, but without
    /// an inherited socket, is its owner's.
    #[must_use]
    pub fn has_our_guest_port(argv: &[String]) -> bool {
        let ours = |word: &String| {
            is_ours("chardev", word) && word.split(',').any(|part| part.starts_with("fd="))
        };
        argv.iter().any(ours)
    }

    /// Adds a port for the helper, at a listening socket that QEMU inherits. It
    /// is the last device on the line, so that the others keep their addresses.
    #[must_use]
    pub fn with_guest_port(&self, listener: RawFd) -> Self {
        let is_bus = |device: &str| {
            value(device, "driver").is_some_and(|driver| driver.starts_with("virtio-serial"))
        };
        let has_bus = self.arguments("device").any(is_bus);
        let chardev = format!("socket,id={GUEST_ID},fd={listener},server=on,wait=off");
        let port = format!("virtserialport,id={GUEST_ID}-port,chardev={GUEST_ID},name={PORT_NAME}");
        let line = self.clone().and("-chardev", &chardev);
        if has_bus {
            return line.and("-device", &port);
        }
        // Without -pci: other machines have it on another bus.
        let line = line.and("-device", &format!("virtio-serial,id={GUEST_ID}-bus"));
        line.and("-device", &format!("{port},bus={GUEST_ID}-bus.0"))
    }
}

/// Whether an option is one that [`CommandLine::with_guest_port`] adds.
pub(super) fn is_ours(option: &str, argument: &str) -> bool {
    let id = argument.split(',').find_map(|part| part.strip_prefix("id="));
    let suffix = id.and_then(|id| id.strip_prefix(GUEST_ID));
    match option {
        "chardev" => suffix == Some(""),
        "device" => matches!(suffix, Some("-bus" | "-port")),
        _ => false,
    }
}

/// A property in the argument of an option such as `-device`.
pub(crate) fn value(device: &str, key: &str) -> Option<String> {
    if device.trim_start().starts_with('{') {
        let device: Value = serde_json::from_str(device).ok()?;
        return match device.get(key)? {
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
    }
    let pieces = pieces(device);
    let named = |piece: &String| Some(piece.strip_prefix(key)?.strip_prefix('=')?.to_owned());
    let implied = || pieces.first().filter(|first| key == "driver" && !first.contains('='));
    pieces.iter().find_map(named).or_else(|| implied().cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_bus_comes_with_the_port_unless_there_is_one() {
        let added = |line: &str| {
            let argv = parse(line).with_guest_port(7).argv();
            argv[parse(line).argv().len()..].join(" ")
        };
        let socket = "-chardev socket,id=droveway-guest,fd=7,server=on,wait=off -device";
        let port = "virtserialport,id=droveway-guest-port,chardev=droveway-guest,\
                    name=org.droveway.guest.0";
        assert_eq!(
            added("qemu -device virtio-rng-pci"),
            format!(
                "{socket} virtio-serial,id=droveway-guest-bus \
                 -device {port},bus=droveway-guest-bus.0"
            )
        );
        for there in [
            "virtio-serial",
            "virtio-serial-pci,id=a",
            "id=a,driver=virtio-serial-device",
            "{\"id\":\"a\",\"driver\":\"virtio-serial-pci\"}",
        ] {
            assert_eq!(added(&format!("qemu -device {there}")), format!("{socket} {port}"));
        }
    }

    #[test]
    fn a_port_of_the_owners_is_seen() {
        let own = "virtserialport,chardev=c,name=org.droveway.guest.0";
        assert!(parse(&format!("qemu -device {own}")).has_guest_port());
        let json = "{\"driver\":\"virtserialport\",\"name\":\"org.droveway.guest.0\"}";
        assert!(parse(&format!("qemu -device {json}")).has_guest_port());
        for other in ["virtserialport,name=org.qemu.guest_agent.0", "{", ""] {
            assert!(!parse(&format!("qemu -device {other}x")).has_guest_port(), "{other}");
        }
        assert!(parse("qemu").with_guest_port(3).has_guest_port());
    }
}
