//! The VNC server on a command line, for a VM's next QEMU on the same host.
//!
//! QEMU accepts clients as soon as it has started. So until the next QEMU has the VM, its server
//! listens where nobody is, with the same options; then QEMU gets the former one's sockets. It has
//! them open from its start, so that they can be found again, and the name of the file at which it
//! listens until then has their numbers.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;

use super::hand_over::OPEN_FILES;
use super::inherited::Address;
use super::machine::{key, pieces};
use super::{CommandLine, Item};

/// The port of the display 0.
const PORT: u16 = 5900;
/// What the next QEMU's server has as well. A password that was set through a monitor (`password`)
/// is not known, and SASL depends on the kind of the first address.
const KEPT: [&str; 14] = [
    "id",
    "share",
    "lossy",
    "non-adaptive",
    "power-control",
    "lock-key-sync",
    "key-delay-ms",
    "connections",
    "audiodev",
    "display",
    "head",
    "password-secret",
    "tls-creds",
    "tls-authz",
];
/// What belongs to the address.
const REPLACED: [&str; 2] = ["ipv4", "ipv6"];

impl CommandLine {
    /// Where its VNC server listens, if the next QEMU can take that over.
    pub(crate) fn vnc_address(&self) -> Option<Address> {
        let mut servers = self.arguments("vnc");
        let first = servers.next()?;
        // Only the first one's addresses can be changed.
        if servers.next().is_some() {
            return None;
        }
        let pieces = pieces(first);
        let (at, options) = pieces.split_first()?;
        let is_known =
            |piece: &String| KEPT.contains(&key(piece)) || REPLACED.contains(&key(piece));
        if !options.iter().all(is_known) {
            return None;
        }
        match at.strip_prefix("unix:") {
            Some("") => None,
            Some(path) => Some(Address::Path(path.to_owned())),
            None => {
                let (_, display) = at.rsplit_once(':')?;
                display.parse::<u16>().ok()?.checked_add(PORT).map(Address::Port)
            }
        }
    }

    /// Has the VNC server listen in a directory that QEMU inherits with this number. These are the
    /// numbers of the sockets that it gets later.
    pub(crate) fn with_vnc_until(&self, dir: RawFd, sockets: &[RawFd]) -> Self {
        let mut line = self.clone();
        let numbers: Vec<String> = sockets.iter().map(RawFd::to_string).collect();
        let address = format!("unix:{OPEN_FILES}{dir}/{}", numbers.join("-"));
        for item in &mut line.items {
            if let Item::Option { name, argument: Some(argument), .. } = item
                && name == "vnc"
            {
                *argument = with_address(argument, &address);
            }
        }
        line
    }
}

/// With which file name the VNC server of a running QEMU waited for its sockets, and their numbers;
/// none if it didn't.
pub(crate) fn vnc_sockets(running: &CommandLine) -> Option<(String, Vec<RawFd>)> {
    sockets_in(running.arguments("vnc").next()?)
}

/// The command line of a running QEMU with the address of its VNC server again. `address` is where
/// its open file of a number listens, as an option `-vnc` has it.
pub(crate) fn with_vnc_address(
    argv: Vec<String>,
    address: impl Fn(RawFd) -> Option<String>,
) -> Vec<String> {
    let named = |word: &str| {
        let (_, numbers) = sockets_in(word)?;
        // If there are several, the host is a name, or left out, and they have one port.
        let address = address(*numbers.first()?)?;
        let address = match (numbers.len(), address.rsplit_once(':')) {
            (2.., Some((_, display))) if !address.starts_with("unix:") => format!(":{display}"),
            _ => address,
        };
        Some(with_address(word, &address))
    };
    argv.into_iter().map(|word| named(&word).unwrap_or(word)).collect()
}

/// An address of a VNC server for a TCP port of this address.
pub(crate) fn vnc_display(address: SocketAddr) -> Option<String> {
    let display = address.port().checked_sub(PORT)?;
    Some(match address.ip() {
        IpAddr::V4(ip) => format!("{ip}:{display}"),
        // It accepts clients of both kinds.
        IpAddr::V6(ip) if ip.is_unspecified() => format!(":{display}"),
        IpAddr::V6(ip) => format!("[{ip}]:{display}"),
    })
}

fn sockets_in(argument: &str) -> Option<(String, Vec<RawFd>)> {
    let first = pieces(argument).into_iter().next()?;
    let path = first.strip_prefix("unix:")?.strip_prefix(OPEN_FILES)?;
    let (_, name) = path.split_once('/')?;
    let numbers: Option<Vec<RawFd>> = name.split('-').map(|number| number.parse().ok()).collect();
    Some((name.to_owned(), numbers?))
}

fn with_address(argument: &str, address: &str) -> String {
    let pieces = pieces(argument);
    let options = pieces.iter().skip(1).filter(|piece| !REPLACED.contains(&key(piece)));
    let mut words = vec![address.replace(',', ",,")];
    words.extend(options.map(|piece| piece.replace(',', ",,")));
    words.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_server_whose_options_are_known_can_be_taken_over() {
        for (line, address) in [
            ("-vnc :1", Address::Port(5901)),
            ("-vnc 127.0.0.1:0,ipv4=on,share=ignore", Address::Port(5900)),
            ("-vnc [::1]:7,password-secret=s,tls-creds=t", Address::Port(5907)),
            ("-vnc unix:/run/a,,b,power-control=on", Address::Path("/run/a,b".to_owned())),
        ] {
            let line = parse(&format!("qemu {line}"));
            assert_eq!(line.vnc_address(), Some(address), "{line:?}");
            assert_eq!(line.exclusive(), []);
        }
        for line in [
            "-vnc :1,password=on",
            "-vnc :1,password",
            "-vnc :1,to=9",
            "-vnc :1,sasl=on",
            "-vnc :1,websocket=on",
            "-vnc host:5500,reverse=on",
            "-vnc :65000",
            "-vnc unix:",
            "-vnc :1 -vnc :2,id=b",
            "-vnc none -vnc :1",
        ] {
            let line = parse(&format!("qemu {line}"));
            assert_eq!(line.vnc_address(), None, "{line:?}");
            assert!(!line.exclusive().is_empty(), "{line:?}");
        }
    }

    #[test]
    fn until_then_it_listens_elsewhere_and_keeps_its_options() {
        let line = parse("qemu -vnc 127.0.0.1:1,ipv4=on,password-secret=s,share=ignore -m 64");
        let started = line.with_vnc_until(7, &[9, 11]);
        let argument = "unix:/proc/self/fd/7/9-11,password-secret=s,share=ignore";
        assert_eq!(started.arguments("vnc").collect::<Vec<_>>(), [argument]);
        assert_eq!(vnc_sockets(&started), Some(("9-11".to_owned(), vec![9, 11])));
        assert_eq!(vnc_sockets(&line), None);
        for other in ["unix:/run/9-11", "unix:/proc/self/fd/7/a", ":1", "none"] {
            assert_eq!(vnc_sockets(&parse(&format!("qemu -vnc {other}"))), None);
        }
    }

    #[test]
    fn a_running_servers_address_is_put_in_again() {
        let again = |sockets: &[RawFd], address: &str| {
            let started = parse("qemu -vnc :1,share=ignore").with_vnc_until(7, sockets);
            with_vnc_address(started.argv(), |number| (number == 9).then(|| address.to_owned()))
                .pop()
                .unwrap()
        };
        assert_eq!(again(&[9], "127.0.0.1:1"), "127.0.0.1:1,share=ignore");
        assert_eq!(again(&[9, 11], "127.0.0.1:1"), ":1,share=ignore");
        assert_eq!(again(&[9], "unix:/a,b"), "unix:/a,,b,share=ignore");
        assert_eq!(again(&[11], "127.0.0.1:1"), "unix:/proc/self/fd/7/11,share=ignore");
        let display = |address: &str| vnc_display(address.parse().unwrap());
        for (address, expected) in [
            ("0.0.0.0:5901", Some("0.0.0.0:1")),
            ("[::]:5900", Some(":0")),
            ("[::1]:5907", Some("[::1]:7")),
            ("127.0.0.1:80", None),
        ] {
            assert_eq!(display(address).as_deref(), expected);
        }
    }
}
