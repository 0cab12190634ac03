//! The speed that a NIC's driver reports.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketType, socket};

/// Drivers of interfaces without a wire, which report an arbitrary speed.
const MADE_UP: [&str; 4] = ["veth", "tun", "bridge", "dummy"];

const GET_DRIVER: u32 = 0x03;
const GET_LINK_SETTINGS: u32 = 0x4c;
/// `struct ethtool_drvinfo` in words: the command, then the driver's name.
const DRIVER_WORDS: usize = 49;
const DRIVER_NAME_WORDS: std::ops::Range<usize> = 1..9;
/// `struct ethtool_link_settings` in words, up to its masks, plus three masks of the greatest
/// length that fits into its signed byte.
const LINK_HEAD_WORDS: usize = 12;
const LINK_WORDS: usize = LINK_HEAD_WORDS + 3 * i8::MAX as usize;
const SPEED_WORD: usize = 1;
/// The word with the masks' length, and the byte in that word.
const MASK_WORD: usize = 3;
const MASK_BYTE: usize = 3;

/// Bytes per second; none if the interface has no wire or no link, or reports no speed.
pub(crate) fn bytes_per_s(name: &str) -> Option<u64> {
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None).ok()?;
    if MADE_UP.contains(&&*driver(&socket, name)?) {
        return None;
    }
    let mut settings = [0; LINK_WORDS];
    settings[0] = GET_LINK_SETTINGS;
    ask(&socket, name, &mut settings)?;
    // The first answer has only the masks' length, negated; the second has everything.
    let mut word = settings[MASK_WORD].to_ne_bytes();
    let words = i8::from_ne_bytes([word[MASK_BYTE]]).checked_neg().filter(|words| *words > 0)?;
    settings = [0; LINK_WORDS];
    settings[0] = GET_LINK_SETTINGS;
    word = [0; 4];
    word[MASK_BYTE] = words.to_ne_bytes()[0];
    settings[MASK_WORD] = u32::from_ne_bytes(word);
    ask(&socket, name, &mut settings)?;
    in_bytes(settings[SPEED_WORD])
}

/// Whether the interface only holds addresses, and carries nothing.
pub(crate) fn is_dummy(name: &str) -> bool {
    let Ok(socket) = socket(AddressFamily::INET, SocketType::DGRAM, None) else { return false };
    driver(&socket, name).as_deref() == Some("dummy")
}

/// Converts the kernel's megabits, which are 0 or all ones without a link.
fn in_bytes(mbit_per_s: u32) -> Option<u64> {
    let known = mbit_per_s > 0 && i32::try_from(mbit_per_s).is_ok();
    known.then(|| u64::from(mbit_per_s) * 125_000)
}

fn driver(socket: &OwnedFd, name: &str) -> Option<String> {
    let mut info = [0; DRIVER_WORDS];
    info[0] = GET_DRIVER;
    ask(socket, name, &mut info)?;
    let bytes = info[DRIVER_NAME_WORDS].iter().flat_map(|word| word.to_ne_bytes());
    let name: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
    String::from_utf8(name).ok()
}

/// Queries the driver of `name`: the first word is the command, and the answer fills all words.
#[expect(unsafe_code, reason = "a C structure with a pointer, for an ioctl")]
fn ask<const WORDS: usize>(socket: &OwnedFd, name: &str, words: &mut [u32; WORDS]) -> Option<()> {
    // SAFETY: all zeros are a valid `ifreq`: arrays of numbers, and a union of
    // numbers, addresses and pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero, which terminates the name.
    let room = request.ifr_name.len() - 1;
    if name.len() > room {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = words.as_mut_ptr().cast();
    // SAFETY: the kernel reads the request and writes at most the structure of
    // the command in `words` there, which is as long as the largest that this
    // command can give: `DRIVER_WORDS` or `LINK_WORDS`.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &mut request) };
    (done == 0).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_speeds_are_none() {
        assert_eq!(in_bytes(1000), Some(125_000_000));
        assert_eq!((in_bytes(0), in_bytes(u32::MAX)), (None, None));
    }

    #[test]
    fn what_has_no_wire_has_no_speed() {
        for name in ["lo", "no such interface", "a name that is far too long for one"] {
            assert_eq!(bytes_per_s(name), None);
            assert!(!is_dummy(name), "{name}");
        }
    }
}
