//! Whether an interface can carry packets, and of which length: by netlink, which alone knows what
//! an interface is a port of. And the removal of one.

use std::fs;
use std::io;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

use crate::nic::NicError;

const GET_LINK: u16 = 18;
const NEW_LINK: u16 = 16;
const REMOVE_LINK: u16 = 17;
const ERROR: u16 = 2;
const REQUEST: u16 = 1;
/// Has the kernel answer, by [`ERROR`] with the number 0, although there is nothing to say.
const ACKNOWLEDGE: u16 = 4;
/// `nlmsghdr`, and `ifinfomsg` behind it.
const HEADER_BYTES: usize = 16;
const LINK_BYTES: usize = 16;
/// Where `ifinfomsg` has the interface's index, and its flags.
const INDEX: usize = 4;
const FLAGS: usize = HEADER_BYTES + 8;
const UP: u32 = 1;
/// Attributes of an interface.
const NAME: u16 = 3;
const MTU: u16 = 4;
const MASTER: u16 = 10;
const LINK_INFO: u16 = 18;
/// In [`LINK_INFO`]: the interface's own kind, not what it is as a port.
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
/// In [`INFO_DATA`] of a bridge.
const BRIDGE_STP: u16 = 5;
const BRIDGE: &[u8] = b"bridge\0";
/// A name's longest length, without the zero at its end.
const NAME_MAX: usize = 15;
/// More than the kernel has to say of one interface.
const ANSWER_MAX: usize = 64 << 10;
const NO_SUCH_DEVICE: i32 = 19;

/// An interface's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// There is no such interface.
    Missing,
    /// It is down, or its bridge is.
    Down,
    /// It is up, on no bridge or other switch, and the host has no address and no route there.
    Alone,
    /// It is up, and a port of a switch, or routed.
    Connected,
}

/// The state of an interface.
///
/// # Errors
/// If the system refuses.
pub fn link_state(name: &str) -> Result<LinkState, NicError> {
    let Some(link) = query(Which::Named(name))? else { return Ok(LinkState::Missing) };
    if !link.is_up {
        return Ok(LinkState::Down);
    }
    Ok(match link.master {
        // Other switches forward packets whether their own interfaces are up or not.
        Some(index) => match query(Which::At(index))? {
            Some(Link { is_bridge: true, is_up: false, .. }) => LinkState::Down,
            _ => LinkState::Connected,
        },
        None if has_address(name) || has_route(name) => LinkState::Connected,
        None => LinkState::Alone,
    })
}

/// Whether an interface is a port of a bridge that runs the spanning tree protocol: after a loss of
/// its carrier, the bridge forwards nothing there for a while.
///
/// # Errors
/// If the system refuses.
pub fn has_spanning_tree(name: &str) -> Result<bool, NicError> {
    let master = query(Which::Named(name))?.and_then(|link| link.master);
    let bridge = master.map(|index| query(Which::At(index))).transpose()?.flatten();
    Ok(bridge.is_some_and(|bridge| bridge.has_spanning_tree))
}

/// The MTU of an interface in bytes, without the link layer's header; none if there is no such
/// interface, or the system refuses.
pub(crate) fn mtu(name: &str) -> Option<u32> {
    query(Which::Named(name)).ok()??.mtu
}

/// The interface's name without the label of one of its addresses: with `ip address add ... label
/// eth0:1` the C library says `eth0:1`, and the counters are those of `eth0`.
pub(crate) fn without_label(name: &str) -> &str {
    name.split_once(':').map_or(name, |(interface, _)| interface)
}

/// Removes an interface; it may be missing.
///
/// # Errors
/// If the system refuses.
pub fn remove_link(name: &str) -> Result<(), NicError> {
    let request = message(REMOVE_LINK, REQUEST | ACKNOWLEDGE, Which::Named(name));
    let done = exchange(&request).and_then(|answer| removed(&answer));
    done.map_err(|source| NicError::System { action: "removing an interface", source })
}

/// How an interface is named.
#[derive(Clone, Copy)]
enum Which<'n> {
    Named(&'n str),
    /// By its index.
    At(u32),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Link {
    is_up: bool,
    /// The index of what it is a port of: a bridge, Open vSwitch's datapath, and the like.
    master: Option<u32>,
    is_bridge: bool,
    has_spanning_tree: bool,
    mtu: Option<u32>,
}

fn query(which: Which<'_>) -> Result<Option<Link>, NicError> {
    if matches!(which, Which::Named(name) if name.is_empty() || name.len() > NAME_MAX) {
        return Ok(None);
    }
    let found = exchange(&message(GET_LINK, REQUEST, which)).and_then(|answer| read(&answer));
    let action = "querying the kernel for an interface";
    found.map_err(|source| NicError::System { action, source })
}

/// Sends a message, and returns the answer.
fn exchange(message: &[u8]) -> io::Result<Vec<u8>> {
    // The default protocol, 0, is `NETLINK_ROUTE`.
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    sendto(&socket, message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = vec![0; ANSWER_MAX];
    let (length, _) = recv(&socket, answer.as_mut_slice(), RecvFlags::empty())?;
    answer.truncate(length);
    Ok(answer)
}

fn message(kind: u16, flags: u16, which: Which<'_>) -> Vec<u8> {
    let mut body = vec![0; LINK_BYTES];
    match which {
        Which::Named(name) => {
            let named = [name.as_bytes(), &[0]].concat();
            body.extend(u16::try_from(4 + named.len()).unwrap_or(u16::MAX).to_ne_bytes());
            body.extend(NAME.to_ne_bytes());
            body.extend(&named);
            body.resize(body.len().next_multiple_of(4), 0);
        }
        Which::At(index) => body[INDEX..INDEX + 4].copy_from_slice(&index.to_ne_bytes()),
    }
    let length = u32::try_from(HEADER_BYTES + body.len()).unwrap_or(u32::MAX);
    let mut message = Vec::from(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // Sequence number and port ID, both unused.
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// Reads the answer; none if there is no such interface.
fn read(answer: &[u8]) -> io::Result<Option<Link>> {
    let odd = || io::Error::from(io::ErrorKind::InvalidData);
    if let Some(number) = error_number(answer) {
        return match number {
            NO_SUCH_DEVICE => Ok(None),
            number => Err(io::Error::from_raw_os_error(number)),
        };
    }
    let kind = short(answer, 4).ok_or_else(odd)?;
    let flags = word(answer, FLAGS).filter(|_| kind == NEW_LINK).ok_or_else(odd)?;
    let is_up = flags & UP != 0;
    let mut link = Link { is_up, ..Link::default() };
    for (kind, content) in attributes(answer.get(HEADER_BYTES + LINK_BYTES..).unwrap_or_default()) {
        match kind {
            MTU => link.mtu = word(content, 0),
            MASTER => link.master = word(content, 0).filter(|index| *index != 0),
            LINK_INFO => {
                let is_bridge = |(kind, name): (u16, &[u8])| kind == INFO_KIND && name == BRIDGE;
                link.is_bridge = attributes(content).any(is_bridge);
                link.has_spanning_tree = link.is_bridge && attributes(content).any(runs_stp);
            }
            _ => {}
        }
    }
    Ok(Some(link))
}

/// Reads the answer to a removal.
fn removed(answer: &[u8]) -> io::Result<()> {
    match error_number(answer) {
        Some(0 | NO_SUCH_DEVICE) => Ok(()),
        Some(number) => Err(io::Error::from_raw_os_error(number)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The number in an error message, 0 for an acknowledgement; none if it is another message.
fn error_number(answer: &[u8]) -> Option<i32> {
    let is_error = short(answer, 4) == Some(ERROR);
    let number = word(answer, HEADER_BYTES).filter(|_| is_error)?;
    Some(number.cast_signed().saturating_neg())
}

/// Whether an attribute in [`LINK_INFO`] of a bridge says so.
fn runs_stp((kind, data): (u16, &[u8])) -> bool {
    let is_on = |(kind, state): (u16, &[u8])| {
        kind == BRIDGE_STP && word(state, 0).is_some_and(|state| state != 0)
    };
    kind == INFO_DATA && attributes(data).any(is_on)
}

/// Attributes with their kinds.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, kind) = (short(bytes, 0)?, short(bytes, 2)?);
        // At least its own header.
        let length = usize::from(length).max(4);
        let content = bytes.get(4..length).unwrap_or_default();
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, content))
    })
}

fn short(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Whether the host has an address there, apart from one that each interface has.
fn has_address(name: &str) -> bool {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    interfaces
        .iter()
        .any(|interface| without_label(&interface.name) == name && !interface.is_link_local())
}

/// Whether a route leads there, in the main table: the address of a routed VM may be in none of the
/// host's networks.
fn has_route(name: &str) -> bool {
    let read = |file| fs::read_to_string(format!("/proc/thread-self/net/{file}"));
    let first = |line: &str| line.split_whitespace().next() == Some(name);
    read("route").unwrap_or_default().lines().any(first)
        || read("ipv6_route").unwrap_or_default().lines().any(|line| leads_to(line, name))
}

/// Whether a line of `ipv6_route` is a route to an interface, apart from those that each interface
/// has: to link-local addresses and multicast, `fe80::` and `ff00::`.
fn leads_to(line: &str, name: &str) -> bool {
    let mut words = line.split_whitespace();
    let to = words.next().unwrap_or_default();
    words.last() == Some(name) && !to.starts_with("fe8") && !to.starts_with("ff")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_label_of_an_address_is_no_part_of_its_interfaces_name() {
        for (name, interface) in [("eth0", "eth0"), ("eth0:1", "eth0"), ("bond0.7:vip", "bond0.7")]
        {
            assert_eq!(without_label(name), interface);
        }
    }

    #[test]
    fn loopback_is_connected_and_a_missing_interface_is_missing() {
        assert_eq!(link_state("lo").unwrap(), LinkState::Connected);
        for name in ["", "no-such-one", "a name that is far too long for one"] {
            assert_eq!(link_state(name).unwrap(), LinkState::Missing, "{name}");
        }
    }

    #[test]
    fn loopback_has_an_mtu_and_a_missing_interface_has_none() {
        assert!(mtu("lo").is_some_and(|mtu| mtu >= 1500), "{:?}", mtu("lo"));
        for name in ["no-such-one", "a name that is far too long for one"] {
            assert_eq!(mtu(name), None);
        }
    }

    #[test]
    fn a_port_is_known_by_its_switch() {
        let attribute = |kind: u16, content: &[u8]| {
            let length = u16::try_from(4 + content.len()).unwrap();
            let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), content].concat();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let answer = |flags: u32, attributes: &[Vec<u8>]| {
            let mut answer = vec![0; HEADER_BYTES + LINK_BYTES];
            answer[4..6].copy_from_slice(&NEW_LINK.to_ne_bytes());
            answer[FLAGS..FLAGS + 4].copy_from_slice(&flags.to_ne_bytes());
            // Of a length that is no multiple of 4.
            answer.extend(attribute(NAME, b"t\0"));
            answer.extend(attributes.concat());
            read(&answer).unwrap()
        };
        let link =
            |is_up, master, is_bridge| Some(Link { is_up, master, is_bridge, ..Link::default() });
        let port = [attribute(MASTER, &7_u32.to_ne_bytes())];
        assert_eq!(answer(UP, &port), link(true, Some(7), false));
        assert_eq!(answer(UP | 0x1000, &[]), link(true, None, false));
        assert_eq!(answer(0x1002, &port), link(false, Some(7), false));
        // What a port is, its bridge's kind, is another attribute.
        let other: &[u8] = b"openvswitch\0";
        for (kind, name, is_bridge) in
            [(INFO_KIND, BRIDGE, true), (4, BRIDGE, false), (INFO_KIND, other, false)]
        {
            let info = [attribute(LINK_INFO, &attribute(kind, name))];
            assert_eq!(answer(0, &info), link(false, None, is_bridge), "{kind}");
        }
        // Its priority, 6, is something else.
        for (kind, state, has_spanning_tree) in
            [(BRIDGE_STP, 1_u32, true), (BRIDGE_STP, 0, false), (6, 1, false)]
        {
            let data = attribute(kind, &state.to_ne_bytes());
            let info = [attribute(INFO_KIND, BRIDGE), attribute(INFO_DATA, &data)].concat();
            let bridge = answer(0, &[attribute(LINK_INFO, &info)]).unwrap();
            assert_eq!(bridge.has_spanning_tree, has_spanning_tree, "{kind} {state}");
        }
    }

    #[test]
    fn a_missing_interface_is_removed_and_an_answer_is_required() {
        if rustix::process::geteuid().is_root() {
            remove_link("no-such-one").unwrap();
        }
        let answer = |kind: u16, number: i32| {
            let mut answer = vec![0; HEADER_BYTES + 4];
            answer[4..6].copy_from_slice(&kind.to_ne_bytes());
            answer[HEADER_BYTES..].copy_from_slice(&number.to_ne_bytes());
            answer
        };
        assert!(removed(&answer(ERROR, 0)).is_ok() && removed(&answer(ERROR, -19)).is_ok());
        let refused = removed(&answer(ERROR, -1)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(removed(&answer(NEW_LINK, 0)).is_err() && removed(&[]).is_err());
    }

    #[test]
    fn a_routed_interface_is_known_by_its_routes() {
        let line =
            |to: &str| format!("{to} 80 {to} 00 {to} 00000100 00000001 00000000 00000001 tap7");
        let zeros = "0".repeat(28);
        for (to, leads) in [("2001", true), ("fe80", false), ("ff00", false)] {
            assert_eq!(leads_to(&line(&format!("{to}{zeros}")), "tap7"), leads, "{to}");
        }
        assert!(!leads_to(&line(&format!("2001{zeros}")), "tap") && !leads_to("", "tap7"));
    }

    proptest! {
        #[test]
        fn whatever_the_answer_is_it_is_read_to_its_end(answer: Vec<u8>) {
            let _ = read(&answer);
        }
    }
}
