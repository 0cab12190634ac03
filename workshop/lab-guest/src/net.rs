//! The guest's NIC: sets its address by netlink, since there is no other program here that could.

use std::io;
use std::net::Ipv4Addr;

use rustix::net::netdevice::name_to_index;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, sendto, socket};

/// The address of a guest that serves, on whatever host it runs.
pub const ADDRESS: Ipv4Addr = address(10);
const PREFIX_BITS: u8 = 24;
const NIC: &str = "eth0";

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const REQUEST_AND_ANSWER: u16 = 0x1 | 0x4;
const CREATE: u16 = 0x400;
const ANSWER: u16 = 2;
const HEADER_BYTES: usize = 16;

/// The address of a guest, by its last part.
#[must_use]
pub const fn address(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 78, 0, last)
}

/// Gives the NIC its address, and brings it up.
///
/// # Errors
/// If there is none, or the kernel refuses.
pub fn up(own: Ipv4Addr) -> io::Result<()> {
    // The default protocol, 0, is `NETLINK_ROUTE`.
    let socket = socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    let nic = name_to_index(&socket, NIC)?;
    for request in [link_up(nic), give(nic, own)] {
        sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let mut answer = [0; 1024];
        let (length, _) = recv(&socket, &mut answer, RecvFlags::empty())?;
        refusal(answer.get(..length).unwrap_or_default())?;
    }
    Ok(())
}

fn link_up(nic: u32) -> Vec<u8> {
    let (no_family, up, only_that) = ([0; 4], 1_u32.to_ne_bytes(), 1_u32.to_ne_bytes());
    let body = [no_family, nic.to_ne_bytes(), up, only_that].concat();
    message(NEW_LINK, REQUEST_AND_ANSWER, &body)
}

fn give(nic: u32, own: Ipv4Addr) -> Vec<u8> {
    const INET: u8 = 2;
    let mut body = vec![INET, PREFIX_BITS, 0, 0];
    body.extend(nic.to_ne_bytes());
    // The address of the other end, and the local one: the same.
    for attribute in [1_u16, 2] {
        body.extend(8_u16.to_ne_bytes());
        body.extend(attribute.to_ne_bytes());
        body.extend(own.octets());
    }
    message(NEW_ADDRESS, REQUEST_AND_ANSWER | CREATE, &body)
}

fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER_BYTES + body.len()).unwrap_or(u32::MAX);
    let mut message = Vec::from(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // Sequence number and port ID, both unused.
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// An answer holds an error number, which is 0 for success.
fn refusal(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    let number = answer.get(HEADER_BYTES..).and_then(|body| body.first_chunk::<4>());
    match (kind, number.map(|number| i32::from_ne_bytes(*number))) {
        (Some(ANSWER), Some(0)) => Ok(()),
        (Some(ANSWER), Some(number)) => Err(io::Error::from_raw_os_error(number.saturating_neg())),
        _ => Err(io::Error::other("netlink gives no answer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_length_that_they_say() {
        for message in [link_up(2), give(2, ADDRESS)] {
            let length = u32::from_ne_bytes(*message.first_chunk().expect("a header"));
            assert_eq!(usize::try_from(length).expect("small"), message.len());
            assert!(message.len().is_multiple_of(4));
        }
    }

    #[test]
    fn refusals_are_recognized() {
        let answer = |number: i32| message(ANSWER, 0, &number.to_ne_bytes());
        assert!(refusal(&answer(0)).is_ok());
        let refused = refusal(&answer(-17)).expect_err("an error");
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert!(refusal(b"short").is_err());
    }
}
