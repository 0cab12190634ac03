//! What a VM's next QEMU on the same host gets from the former one, because two can't have it.
//!
//! Two QEMUs can't listen at the same path or port: the second one would remove the first one's
//! socket. So the next one inherits the open socket; only that of a monitor is made anew. And a
//! file for the guest's output is continued, where a QEMU that starts would empty it.

use std::os::fd::RawFd;

use super::guest_port::value;
use super::machine::{key, pieces, with_properties};
use super::{CommandLine, GUEST_ID, Item, QMP_ID, option};

/// What stands for where a socket listens, and how it begins.
const REPLACED: [&str; 9] =
    ["path", "host", "port", "ipv4", "ipv6", "server", "wait", "nowait", "fd"];
/// Of a socket that has no file or no fixed port, or a log that each QEMU empties.
const SPECIAL: [&str; 5] = ["abstract", "tight", "logfile", "to", "fd"];
/// Options that use a character device for something else than a port of the guest.
const OTHER_USERS: [&str; 6] = ["object", "netdev", "nic", "net", "tpmdev", "fsdev"];
/// Options of monitors, which have a short form.
const MONITORS: [&str; 3] = ["monitor", "qmp", "qmp-pretty"];
/// In the names of sockets that wait for the name of a monitor.
const NAME_UNTIL: &str = ".droveway-";
/// Options with the guest's output, which have a short form.
const OUTPUTS: [&str; 3] = ["serial", "parallel", DEBUGCON];
/// QEMU gives that device the character device of this id, whatever the option names.
const DEBUGCON: &str = "debugcon";
/// How devices begin whose back end is at the other end of a socket.
const SERVED: [&str; 2] = ["vhost-user", "ivshmem"];

/// Where a QEMU listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// At a path.
    Path(String),
    /// At a TCP port, of whatever addresses.
    Port(u16),
}

/// A listening socket that a VM's next QEMU has as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listening {
    /// Where it listens.
    pub(crate) address: Address,
    /// Whether its clients command QEMU. They must not reach the next one before it has the VM, so
    /// that one gets another socket, and later its name.
    pub(crate) commands: bool,
}

/// Who uses a character device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum User {
    /// Ports of the guest alone.
    Guest,
    /// A monitor.
    Monitor,
    /// Something else, or that may be.
    Other,
}

impl CommandLine {
    /// The sockets that the next QEMU has as well, in order: those at which ports of the guest and
    /// monitors listen.
    pub(crate) fn inherited_sockets(&self) -> Vec<Listening> {
        let line = self.expanded();
        line.items.iter().filter_map(|item| line.inherited_socket(item)).collect()
    }

    /// Where an option listens, if the next QEMU has its socket as well.
    pub(super) fn inherited_socket(&self, item: &Item) -> Option<Listening> {
        let Item::Option { name, argument: Some(argument), .. } = item else { return None };
        let address = listens_at(argument).filter(|_| name == "chardev")?;
        let commands = match self.user_of(&value(argument, "id")?) {
            User::Guest => false,
            // A port has no name that could be given to another socket.
            User::Monitor if matches!(address, Address::Path(_)) => true,
            User::Monitor | User::Other => return None,
        };
        Some(Listening { address, commands })
    }

    /// The same with a `-chardev` for each listening socket that has only a short form.
    pub(super) fn expanded(&self) -> Self {
        let mut line = Self { program: self.program.clone(), items: Vec::new() };
        for item in &self.items {
            match expanded(item, line.items.len()) {
                Some(items) => line.items.extend(items),
                None => line.items.push(item.clone()),
            }
        }
        line
    }

    /// Who uses a character device.
    fn user_of(&self, id: &str) -> User {
        let quoted = format!("\"{id}\"");
        let is_it = |piece: &String| key(piece) != "id" && piece.rsplit('=').next() == Some(id);
        let has = |argument: &str| pieces(argument).iter().any(is_it) || argument.contains(&quoted);
        let ends = |argument: &str| argument.rsplit(':').next() == Some(id);
        let served = |device: &str| {
            let kind = value(device, "driver").unwrap_or_default();
            SERVED.iter().any(|start| kind.starts_with(start)) && has(device)
        };
        let is_other = OTHER_USERS.iter().any(|option| self.arguments(option).any(has))
            || self.arguments("gdb").any(ends)
            || OUTPUTS.iter().any(|option| self.arguments(option).any(|one| is_mixed(one, id)))
            || self.arguments("device").any(served);
        let has_monitor = self.arguments("mon").any(has)
            || MONITORS.iter().any(|option| self.arguments(option).any(ends));
        match (is_other, has_monitor) {
            (true, _) => User::Other,
            (false, true) => User::Monitor,
            (false, false) => User::Guest,
        }
    }

    /// Puts in the numbers of these sockets, as QEMU inherits them.
    pub(crate) fn with_inherited_sockets(&self, sockets: &[RawFd]) -> Self {
        let mut line = self.expanded();
        let whole = line.clone();
        let mut sockets = sockets.iter();
        for item in &mut line.items {
            if whole.inherited_socket(item).is_some()
                && let Item::Option { argument: Some(argument), .. } = item
                && let Some(socket) = sockets.next()
            {
                let put =
                    [("fd", (*socket).into()), ("server", true.into()), ("wait", false.into())];
                *argument = with_properties(argument, &REPLACED, &put);
            }
        }
        line
    }

    /// Has files with the guest's output continued.
    pub(crate) fn appending(&self) -> Self {
        let mut line = Self { program: self.program.clone(), items: Vec::new() };
        for item in &self.items {
            let (Item::Option { typed, name, argument: Some(argument) }, at) =
                (item, line.items.len())
            else {
                line.items.push(item.clone());
                continue;
            };
            let short = argument.strip_prefix("file:").filter(|_| OUTPUTS.contains(&&**name));
            if let Some(path) = short {
                // The short form has no option for it.
                let id = match name.as_str() {
                    DEBUGCON => DEBUGCON.to_owned(),
                    _ => format!("droveway-file{at}"),
                };
                let path = path.replace(',', ",,");
                let chardev = format!("file,id={id},path={path},append=on");
                line.items.push(option("-chardev", Some(&chardev)));
                line.items.push(option(typed, Some(&format!("chardev:{id}"))));
            } else if name == "chardev" && empties(argument) {
                line.items.push(option(typed, Some(&format!("{argument},append=on"))));
            } else {
                line.items.push(item.clone());
            }
        }
        line
    }
}

/// The option as a `-chardev` and its user, if it is a listening socket in its short form.
fn expanded(item: &Item, at: usize) -> Option<[Item; 2]> {
    let Item::Option { typed, name, argument: Some(argument) } = item else { return None };
    let has_short_form = OUTPUTS.contains(&name.as_str()) || MONITORS.contains(&name.as_str());
    let socket = long_form(argument).filter(|_| has_short_form)?;
    let id = match name.as_str() {
        DEBUGCON => DEBUGCON.to_owned(),
        _ => format!("droveway-port{at}"),
    };
    let chardev = format!("socket,id={id},{socket}");
    let address = listens_at(&chardev)?;
    // Then it stays as it is, and is named as it was typed.
    if MONITORS.contains(&name.as_str()) && matches!(address, Address::Port(_)) {
        return None;
    }
    Some([option("-chardev", Some(&chardev)), option(typed, Some(&format!("chardev:{id}")))])
}

/// The properties of a socket in its short form, such as `unix:/s,server=on`.
fn long_form(argument: &str) -> Option<String> {
    let (kind, rest) = argument.split_once(':')?;
    let protocol = match kind {
        "unix" if rest.split(',').next()?.contains('=') => return Some(rest.to_owned()),
        "unix" => return Some(format!("path={rest}")),
        "tcp" => "",
        "telnet" => ",telnet=on",
        "tn3270" => ",tn3270=on",
        "websocket" => ",websocket=on",
        _ => return None,
    };
    let (address, options) = rest.split_once(',')?;
    let (host, port) = address.split_once(':')?;
    Some(format!("host={host},port={port},{options}{protocol}"))
}

/// The command line of a running QEMU of the agent with addresses in place of the numbers of
/// sockets that it inherited. `address` is where its open file of that number listens, in the form
/// of an option.
pub(crate) fn with_addresses(
    argv: Vec<String>,
    address: impl Fn(RawFd) -> Option<String>,
) -> Vec<String> {
    let named = |word: &str| {
        let pieces = pieces(word);
        let id = value(word, "id")?;
        if pieces.first()? != "socket" || id == QMP_ID || id == GUEST_ID {
            return None;
        }
        let address = address(value(word, "fd")?.parse().ok()?)?;
        let fd = pieces.iter().position(|piece| key(piece) == "fd")?;
        let mut words: Vec<String> = pieces.iter().map(|piece| piece.replace(',', ",,")).collect();
        words[fd] = address;
        Some(words.join(","))
    };
    argv.into_iter().map(|word| named(&word).unwrap_or(word)).collect()
}

/// The name of a monitor's socket until its QEMU has the VM, next to one that has the name `now`:
/// hidden, and another one than that.
pub(crate) fn name_until(now: &str) -> String {
    let name = name_after(now);
    let first = format!(".{name}{NAME_UNTIL}0");
    if now == first { format!(".{name}{NAME_UNTIL}1") } else { first }
}

/// The name that a monitor's socket gets which was made with the name `made`.
pub(crate) fn name_after(made: &str) -> &str {
    let hidden = made.strip_prefix('.');
    let name = hidden.and_then(|rest| {
        let (name, turn) = rest.rsplit_once(NAME_UNTIL)?;
        (!name.is_empty() && matches!(turn, "0" | "1")).then_some(name)
    });
    name.unwrap_or(made)
}

/// Where a character device listens, as a socket whose address is fixed.
fn listens_at(argument: &str) -> Option<Address> {
    let pieces = pieces(argument);
    let is_on = |piece: &String| matches!(piece.as_str(), "server" | "server=on" | "server=true");
    let is_plain = !pieces.iter().any(|piece| SPECIAL.contains(&key(piece)));
    if pieces.first()? != "socket" || !is_plain || !pieces.iter().any(is_on) {
        return None;
    }
    match (value(argument, "path"), value(argument, "port")) {
        (Some(path), None) if !path.is_empty() => Some(Address::Path(path)),
        (None, Some(port)) => port.parse().ok().filter(|port| *port != 0).map(Address::Port),
        _ => None,
    }
}

/// Whether a port of the guest shares its device with the monitor.
fn is_mixed(argument: &str, id: &str) -> bool {
    argument.strip_prefix("mon:").is_some_and(|device| device.rsplit(':').next() == Some(id))
}

/// Whether a character device empties its file when QEMU starts.
fn empties(argument: &str) -> bool {
    let pieces = pieces(argument);
    pieces.first().is_some_and(|kind| kind == "file")
        && !pieces.iter().any(|piece| key(piece) == "append")
}

#[cfg(test)]
mod tests;
