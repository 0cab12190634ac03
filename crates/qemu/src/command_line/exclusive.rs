//! What a command line takes that only one QEMU at a time can have: taps without a name, open files
//! of the program that started it, and sockets that the next QEMU neither inherits nor gets later.
//!
//! What is not known to be harmless counts.

use super::guest_port::value;
use super::machine::{backend, pieces};
use super::taps::passed_in;
use super::{CommandLine, Item};

/// Keys of options by which QEMU gets open files.
const OPEN_FILES: [&str; 4] = ["fd", "fds", "vhostfd", "vhostfds"];
/// Paths of open files.
const OPEN_PATHS: [&str; 3] = ["/dev/fdset/", "/dev/fd/", "/proc/self/fd/"];
/// Character devices that need nothing but QEMU itself, or a file that it writes.
const PLAIN: [&str; 9] =
    ["null", "none", "file", "stdio", "vc", "ringbuf", "memory", "chardev", "msmouse"];
/// Options whose argument is a character device without `-chardev`.
const CHARACTER: [&str; 7] =
    ["serial", "parallel", "monitor", "qmp", "qmp-pretty", "debugcon", "gdb"];
/// Networks inside of QEMU.
const INNER: [&str; 4] = ["user", "hubport", "none", "nic"];

/// Something on a command line that only one QEMU at a time can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} {what}")]
pub struct Exclusive {
    /// The option, with its id if it has one. Nothing else of it: it may contain a password.
    pub option: String,
    /// What it does.
    pub what: &'static str,
}

impl CommandLine {
    /// All that only one QEMU at a time can have.
    #[must_use]
    pub fn exclusive(&self) -> Vec<Exclusive> {
        let line = self.expanded();
        let has_known_vnc = line.vnc_address().is_some();
        let options = line.items.iter().filter_map(|item| match item {
            Item::Option { .. } if line.inherited_socket(item).is_some() => None,
            Item::Option { .. } if passed_in(item).is_some() => None,
            Item::Option { name, .. } if name == "vnc" && has_known_vnc => None,
            Item::Option { name, argument, .. } => Some((name, argument.as_deref())),
            Item::Word(_) => None,
        });
        let found = options.filter_map(|(name, argument)| {
            let argument = argument.unwrap_or_default();
            let what = what(name, argument)?;
            let id = value(argument, "id").map_or_else(String::new, |id| format!(" {id}"));
            Some(Exclusive { option: format!("-{name}{id}"), what })
        });
        found.collect()
    }
}

fn what(name: &str, argument: &str) -> Option<&'static str> {
    if name == "append" {
        // The guest's kernel reads it.
        return None;
    }
    if name == "object" && backend(argument).is_some_and(|backend| backend.made.is_some()) {
        // The agent passes that file on.
        return None;
    }
    if name == "add-fd" || has_open_file(argument) {
        return Some(OPEN_FILE);
    }
    match name {
        "netdev" | "nic" | "net" => {
            let forwards = value(argument, "hostfwd").is_some();
            let is_inner = INNER.contains(&kind(argument).as_str()) && !forwards;
            (!is_inner).then_some("is connected to a network of the host")
        }
        "chardev" => (!PLAIN.contains(&kind(argument).as_str())).then_some(CONNECTED),
        name if CHARACTER.contains(&name) => {
            let device = argument.strip_prefix("mon:").unwrap_or(argument);
            let kind = device.split([':', ',']).next().unwrap_or_default();
            (!PLAIN.contains(&kind)).then_some(CONNECTED)
        }
        "vnc" if argument == "none" => None,
        "display" if !argument.starts_with("vnc") && !argument.starts_with("spice") => None,
        "vnc" | "spice" | "display" | "s" => Some("listens for clients"),
        "tpmdev" => Some("has a TPM that serves one QEMU"),
        "snapshot" => Some(TEMPORARY),
        "drive" if value(argument, "snapshot").is_some_and(|on| on != "off") => Some(TEMPORARY),
        "readconfig" => Some("has options in a file, which are not examined"),
        _ => None,
    }
}

const OPEN_FILE: &str = "takes an open file of the program that started QEMU";
const CONNECTED: &str = "is connected to something outside of QEMU";
const TEMPORARY: &str = "writes to temporary files, which another QEMU would not have";

fn has_open_file(argument: &str) -> bool {
    OPEN_FILES.iter().any(|key| value(argument, key).is_some())
        || OPEN_PATHS.iter().any(|path| argument.contains(path))
}

/// The kind of a network or character device.
fn kind(argument: &str) -> String {
    value(argument, "type").or_else(|| pieces(argument).into_iter().next()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> Vec<String> {
        let words: Vec<&str> = std::iter::once("qemu").chain(line.split(' ')).collect();
        let found = CommandLine::parse(&words).unwrap().exclusive();
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_two_qemus_can_have_is_left_out() {
        for line in [
            "-m 64 -nodefaults -display none -drive file=a.img,if=virtio,snapshot=off disk.img",
            "-netdev user,id=n -nic none -net nic -net user -netdev hubport,id=h,hubid=0",
            "-netdev {\"type\":\"user\",\"id\":\"n\"}",
            "-netdev tap,id=n,ifname=t0,script=no -nic tap,ifname=t1,vhost=on",
            "-chardev file,id=c,path=/tmp/log -chardev null,id=d -serial chardev:c",
            "-serial mon:stdio -serial file:/tmp/log -monitor none -parallel null -vnc none",
            "-append fd=3 -name web1,debug-threads=on -display gtk",
            "-object memory-backend-file,id=r,share=on,mem-path=/proc/self/fd/droveway-ram",
            "-chardev socket,id=talk,path=/s,server=on,wait=off -serial chardev:talk",
            "-serial unix:/s,server=on -qmp unix:/q,server=on,wait=off -pidfile /run/p -vnc :1",
        ] {
            assert_eq!(found(line), [""; 0], "{line}");
        }
    }

    #[test]
    fn what_only_one_qemu_can_have_is_named_by_its_option() {
        let network = "is connected to a network of the host";
        for (line, option, what) in [
            ("-netdev tap,id=n,script=no", "-netdev n", network),
            ("-netdev tap,id=n,ifname=t0,helper=/h", "-netdev n", network),
            ("-netdev user,id=n,hostfwd=tcp::22-:22", "-netdev n", network),
            ("-netdev {\"type\":\"vhost-user\",\"id\":\"v\"}", "-netdev v", network),
            ("-nic bridge,br=br0", "-nic", network),
            ("-netdev tap,id=n,fd=7,vhost=on,vhostfd=8", "-netdev n", OPEN_FILE),
            ("-chardev socket,id=m,fd=22,server=on", "-chardev m", OPEN_FILE),
            ("-add-fd fd=3,set=2", "-add-fd", OPEN_FILE),
            ("-blockdev driver=file,filename=/dev/fdset/2,node-name=f", "-blockdev", OPEN_FILE),
            ("-object memory-backend-file,id=r,mem-path=/proc/self/fd/7", "-object r", OPEN_FILE),
            ("-chardev socket,id=talk,path=/s", "-chardev talk", CONNECTED),
            ("-serial unix:/s", "-serial", CONNECTED),
            ("--serial pty", "-serial", CONNECTED),
            ("-monitor telnet::4444,server", "-monitor", CONNECTED),
            ("-qmp unix:/s", "-qmp", CONNECTED),
            ("-gdb tcp::1234", "-gdb", CONNECTED),
            ("-vnc :1,password=on", "-vnc", "listens for clients"),
            ("-display vnc=:1", "-display", "listens for clients"),
            ("-s", "-s", "listens for clients"),
            ("-tpmdev emulator,id=t,chardev=c", "-tpmdev t", "has a TPM that serves one QEMU"),
            ("-drive file=a.img,id=d,snapshot=on", "-drive d", TEMPORARY),
            ("-snapshot", "-snapshot", TEMPORARY),
        ] {
            assert_eq!(found(line), [format!("{option} {what}")], "{line}");
        }
    }
}
