//! The MTU of an interface.

use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketType, socket};

/// The MTU in bytes, without the link layer's header; none if there is no such interface.
#[expect(unsafe_code, reason = "a C structure with a union, for an ioctl")]
pub(crate) fn bytes(name: &str) -> Option<u32> {
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None).ok()?;
    // SAFETY: all zeros are a valid `ifreq`: arrays of numbers, and a union of
    // numbers, addresses and pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero, which terminates the name.
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    // SAFETY: the kernel reads the name and writes the number into the request,
    // which outlives the call.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &mut request) };
    if done != 0 {
        return None;
    }
    // SAFETY: this command fills in this member, and any value of it is valid.
    u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_an_mtu_and_a_missing_interface_has_none() {
        assert!(bytes("lo").is_some_and(|mtu| mtu >= 1500), "{:?}", bytes("lo"));
        for name in ["no such one", "a name that is far too long for one"] {
            assert_eq!(bytes(name), None);
        }
    }
}
