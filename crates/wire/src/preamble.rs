//! The first bytes of every connection.

use crate::error::WireError;
use crate::read::{field, le16};

/// The version of everything in this crate. It changes when a peer that knows
/// only the older one would misunderstand.
pub const VERSION: u16 = 4;

const MAGIC: [u8; 8] = *b"DROVEWAY";

/// What ties a lane to its migration: made by the destination for each one,
/// 128 random bits, told to the source alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Token(pub [u8; 16]);

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One migration's control connection.
    Control,
    /// One lane of the migration that the token names.
    Lane {
        /// Which lane, counted from 0; for messages only.
        number: u16,
        /// Which migration.
        token: Token,
    },
    /// One [`crate::Inquiry`] about a switchover that one side was cut off
    /// from, and at most one answer.
    Inquiry,
    /// What the crate `directory` says, to the directory of a rack.
    Directory,
    /// [`crate::Order`]s, each with its answer.
    Orders,
    /// [`crate::Wants`], and content.
    Content,
}

/// Sent by whoever connects.
///
/// ```text
/// 0  magic "DROVEWAY"   8  version u16   10 kind u16   12 lane u16   14 zero u16   16 token [16]
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// What the connection is for.
    pub kind: Kind,
}

impl Preamble {
    /// Its length on the wire.
    pub const BYTES: usize = 32;

    /// As bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        let kind: u16 = match self.kind {
            Kind::Control => 0,
            Kind::Lane { number, token } => {
                bytes[12..14].copy_from_slice(&number.to_le_bytes());
                bytes[16..].copy_from_slice(&token.0);
                1
            }
            Kind::Inquiry => 2,
            Kind::Directory => 3,
            Kind::Orders => 4,
            Kind::Content => 5,
        };
        bytes[10..12].copy_from_slice(&kind.to_le_bytes());
        bytes
    }

    /// From a peer's bytes.
    ///
    /// # Errors
    /// If it isn't Droveway, another version, or an unknown kind.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        check_magic_and_version(bytes)?;
        let kind = match le16(bytes, 10) {
            0 => Kind::Control,
            1 => Kind::Lane { number: le16(bytes, 12), token: Token(field(bytes, 16)) },
            2 => Kind::Inquiry,
            3 => Kind::Directory,
            4 => Kind::Orders,
            5 => Kind::Content,
            other => {
                return Err(WireError::Unknown {
                    what: "kind of connection",
                    value: u64::from(other),
                });
            }
        };
        Ok(Self { kind })
    }
}

/// The answer to a preamble.
///
/// ```text
/// 0  magic "DROVEWAY"   8  version u16   10 status u16   12 zero u32
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Go on.
    Welcome,
    /// No migration has this token (any more).
    UnknownToken,
    /// The agent takes no connection now (it is stopping or full).
    Busy,
    /// The agent speaks another version; the reply carries which.
    OtherVersion,
}

impl Reply {
    /// Its length on the wire.
    pub const BYTES: usize = 16;

    /// As bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let status: u16 = match self {
            Self::Welcome => 0,
            Self::UnknownToken => 1,
            Self::Busy => 2,
            Self::OtherVersion => 3,
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&status.to_le_bytes());
        bytes
    }

    /// From a peer's bytes.
    ///
    /// # Errors
    /// If it isn't Droveway, another version, or an unknown status.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        check_magic_and_version(bytes)?;
        match le16(bytes, 10) {
            0 => Ok(Self::Welcome),
            1 => Ok(Self::UnknownToken),
            2 => Ok(Self::Busy),
            3 => Ok(Self::OtherVersion),
            other => Err(WireError::Unknown { what: "status", value: u64::from(other) }),
        }
    }
}

fn check_magic_and_version(bytes: &[u8]) -> Result<(), WireError> {
    let found: [u8; 8] = field(bytes, 0);
    if found != MAGIC {
        return Err(WireError::NotDroveway { found });
    }
    match le16(bytes, 8) {
        VERSION => Ok(()),
        peer => Err(WireError::Version { peer, ours: VERSION }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preambles_and_replies_come_back_as_they_went() {
        let lane = Kind::Lane { number: 7, token: Token([9; 16]) };
        for kind in [Kind::Control, lane, Kind::Inquiry, Kind::Orders] {
            assert_eq!(Preamble::parse(&Preamble { kind }.to_bytes()).unwrap().kind, kind);
        }
        for reply in [Reply::Welcome, Reply::UnknownToken, Reply::Busy, Reply::OtherVersion] {
            assert_eq!(Reply::parse(&reply.to_bytes()).unwrap(), reply);
        }
    }

    #[test]
    fn a_stranger_and_another_version_are_told_apart() {
        let mut bytes = Preamble { kind: Kind::Control }.to_bytes();
        bytes[8] = 77;
        let error = Preamble::parse(&bytes).unwrap_err();
        assert!(matches!(error, WireError::Version { peer: 77, ours: VERSION }), "{error}");
        bytes[0] = b'G';
        assert!(matches!(Preamble::parse(&bytes).unwrap_err(), WireError::NotDroveway { .. }));
    }
}
