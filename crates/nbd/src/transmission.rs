//! The messages once an export is chosen: requests and simple replies.

use crate::{Errno, ProtocolError};

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// WRITE_ZEROES: the zeroes must take space.
pub const NO_HOLE: u16 = 1 << 1;

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command(pub u16);

impl Command {
    /// Reads from the disk.
    pub const READ: Self = Self(0);
    /// Writes the payload that follows.
    pub const WRITE: Self = Self(1);
    /// Ends the connection; there is no reply.
    pub const DISCONNECT: Self = Self(2);
    /// Makes requests durable that were answered before.
    pub const FLUSH: Self = Self(3);
    /// Discards content that is not needed any more.
    pub const TRIM: Self = Self(4);
    /// Writes zeroes, without a payload.
    pub const WRITE_ZEROES: Self = Self(6);
}

/// A request without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Modifies the command.
    pub flags: u16,
    /// What to do.
    pub command: Command,
    /// Returned in the reply.
    pub cookie: u64,
    /// Where on the disk.
    pub offset: u64,
    /// How much of it.
    pub bytes: u32,
}

impl RequestHeader {
    /// Its size.
    pub const BYTES: usize = 28;

    /// Parses one.
    ///
    /// # Errors
    /// If its magic number is wrong. Any command and flags are accepted.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ProtocolError> {
        let [m0, m1, m2, m3, f0, f1, t0, t1, rest @ ..] = *bytes;
        let magic = u32::from_be_bytes([m0, m1, m2, m3]);
        if magic != REQUEST_MAGIC {
            return Err(ProtocolError::Magic { what: "a request", found: magic.into() });
        }
        let [c0, c1, c2, c3, c4, c5, c6, c7, rest @ ..] = rest;
        let [o0, o1, o2, o3, o4, o5, o6, o7, length @ ..] = rest;
        Ok(Self {
            flags: u16::from_be_bytes([f0, f1]),
            command: Command(u16::from_be_bytes([t0, t1])),
            cookie: u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]),
            offset: u64::from_be_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            bytes: u32::from_be_bytes(length),
        })
    }

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.to_be_bytes());
        out[6..8].copy_from_slice(&self.command.0.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..].copy_from_slice(&self.bytes.to_be_bytes());
        out
    }
}

/// The reply to a request. The payload of a READ follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    /// The request's cookie.
    pub cookie: u64,
    /// How it ended.
    pub outcome: Result<(), Errno>,
}

impl SimpleReply {
    /// Its size.
    pub const BYTES: usize = 16;

    /// Parses one.
    ///
    /// # Errors
    /// If its magic number is wrong.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ProtocolError> {
        let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = *bytes;
        let magic = u32::from_be_bytes([m0, m1, m2, m3]);
        if magic != REPLY_MAGIC {
            return Err(ProtocolError::Magic { what: "a reply", found: magic.into() });
        }
        let outcome = match u32::from_be_bytes([e0, e1, e2, e3]) {
            0 => Ok(()),
            errno => Err(Errno(errno)),
        };
        Ok(Self { cookie: u64::from_be_bytes(cookie), outcome })
    }

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let errno = self.outcome.err().map_or(0, |errno| errno.0);
        out[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
        out[4..8].copy_from_slice(&errno.to_be_bytes());
        out[8..].copy_from_slice(&self.cookie.to_be_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(
            flags: u16, command: u16, cookie: u64, offset: u64, bytes: u32, errno: u32,
        ) {
            let header = RequestHeader { flags, command: Command(command), cookie, offset, bytes };
            prop_assert_eq!(RequestHeader::parse(&header.to_bytes()), Ok(header));
            let outcome = if errno == 0 { Ok(()) } else { Err(Errno(errno)) };
            let reply = SimpleReply { cookie, outcome };
            prop_assert_eq!(SimpleReply::parse(&reply.to_bytes()), Ok(reply));
        }

        #[test]
        fn what_is_read_is_written_back(bytes in any::<[u8; 28]>(), sound: bool) {
            let mut bytes = bytes;
            if sound {
                bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
            }
            if let Ok(header) = RequestHeader::parse(&bytes) {
                prop_assert_eq!(header.to_bytes(), bytes);
            }
        }
    }

    #[test]
    fn a_write_is_what_the_protocol_says() {
        let header = RequestHeader {
            flags: 0,
            command: Command::WRITE,
            cookie: 0x0102_0304_0506_0708,
            offset: 4096,
            bytes: 512,
        };
        let wire = b"\x25\x60\x95\x13\0\0\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\
                     \0\0\0\0\0\0\x10\0\0\0\x02\0";
        assert_eq!(&header.to_bytes(), wire);
        let reply = SimpleReply { cookie: 7, outcome: Err(Errno::NO_SPACE) };
        assert_eq!(&reply.to_bytes(), b"\x67\x44\x66\x98\0\0\0\x1c\0\0\0\0\0\0\0\x07");
    }

    #[test]
    fn another_magic_is_refused() {
        let error = RequestHeader::parse(&[0; 28]).unwrap_err();
        assert!(error.to_string().contains("a request starts with 0x0"), "{error}");
        assert!(SimpleReply::parse(&[0xff; 16]).is_err());
    }
}
