//! The first bytes of every connection, by which two agents agree on a version.

use std::fmt;

use crate::error::WireError;
use crate::read::{field, le16};

/// The version of everything in this crate. It changes when a peer that knows only the older one
/// would misunderstand.
pub const VERSION: u16 = 4;

/// The oldest version that is still spoken: that of the release before this one.
const OLDEST: u16 = 4;

/// The versions of the protocol that an agent speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest of them.
    pub oldest: u16,
    /// The newest of them.
    pub newest: u16,
}

impl Versions {
    /// The versions that this agent speaks.
    pub const SPOKEN: Self = Self { oldest: OLDEST, newest: VERSION };

    /// A single version.
    #[must_use]
    pub const fn only(version: u16) -> Self {
        Self { oldest: version, newest: version }
    }

    /// The newest version that both speak.
    #[must_use]
    pub fn common(self, theirs: Self) -> Option<u16> {
        let newest = self.newest.min(theirs.newest);
        (newest >= self.oldest.max(theirs.oldest)).then_some(newest)
    }

    /// Whether it contains `version`.
    #[must_use]
    pub fn contains(self, version: u16) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }

    /// Versions as sent on the wire: release 0.1.0 leaves `oldest` zero, and speaks a single
    /// version.
    fn said(oldest: u16, newest: u16) -> Self {
        Self { oldest: if oldest == 0 { newest } else { oldest.min(newest) }, newest }
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { oldest, newest } if oldest == newest => write!(f, "version {newest}"),
            Self { oldest, newest } => write!(f, "versions {oldest} to {newest}"),
        }
    }
}

const MAGIC: [u8; 8] = *b"DROVEWAY";

/// Ties a lane to its migration: 128 random bits that the destination makes for each migration and
/// tells only the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Token(pub [u8; 16]);

/// The kind of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One migration's control connection.
    Control,
    /// One lane of the migration that the token names.
    Lane {
        /// The lane's number, counted from 0; for messages only.
        number: u16,
        /// The migration.
        token: Token,
    },
    /// One [`crate::Inquiry`] about a switchover after one side was cut off, and at most one
    /// answer.
    Inquiry,
    /// Messages of the crate `directory` to the directory of a rack.
    Directory,
    /// [`crate::Order`]s, each with its answer.
    Orders,
    /// [`crate::ContentRequest`], and content.
    Content,
}

/// The first bytes of the connecting side.
///
/// ```text
/// 0  magic "DROVEWAY"   8  newest u16   10 kind u16   12 lane u16   14 oldest u16   16 token [16]
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// The kind of the connection.
    pub kind: Kind,
    /// The versions that it offers.
    pub versions: Versions,
}

impl Preamble {
    /// Its length on the wire.
    pub const BYTES: usize = 32;

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.versions.newest.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.versions.oldest.to_le_bytes());
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

    /// Parses a peer's bytes; returns the connection's kind, and the version that both speak from
    /// now on.
    ///
    /// # Errors
    /// If the peer is not Droveway, there is no common version, or the kind is unknown.
    pub fn parse(bytes: &[u8; Self::BYTES], ours: Versions) -> Result<(Kind, u16), WireError> {
        check_magic(bytes)?;
        let theirs = Versions::said(le16(bytes, 14), le16(bytes, 8));
        let version = ours.common(theirs).ok_or(WireError::Version { theirs, ours })?;
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
        Ok((kind, version))
    }
}

/// The answer to a preamble.
///
/// ```text
/// 0  magic "DROVEWAY"   8  version u16   10 status u16   12 oldest u16   14 zero u16
/// ```
///
/// `version` is spoken from now on; with status 3 it is the newest that the agent speaks, and
/// `oldest` the oldest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Go on.
    Welcome,
    /// No migration has this token, or no longer.
    UnknownToken,
    /// The agent accepts no connection now (it is stopping or full).
    Busy,
    /// The agent speaks none of the offered versions.
    OtherVersion(Versions),
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Welcome => "it does take it",
            Self::UnknownToken => "it knows no such migration",
            Self::Busy => "it is busy, or stopping",
            Self::OtherVersion(_) => "it is of another version",
        })
    }
}

impl Reply {
    /// Its length on the wire.
    pub const BYTES: usize = 16;

    /// Its bytes, for a peer that speaks `version` too.
    #[must_use]
    pub fn to_bytes(self, version: u16) -> [u8; Self::BYTES] {
        let (status, version, oldest): (u16, u16, u16) = match self {
            Self::Welcome => (0, version, 0),
            Self::UnknownToken => (1, version, 0),
            Self::Busy => (2, version, 0),
            Self::OtherVersion(ours) => (3, ours.newest, ours.oldest),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&version.to_le_bytes());
        bytes[10..12].copy_from_slice(&status.to_le_bytes());
        bytes[12..14].copy_from_slice(&oldest.to_le_bytes());
        bytes
    }

    /// Parses the reply to a preamble that offered these versions; returns it with the version that
    /// both speak from now on.
    ///
    /// # Errors
    /// If the peer is not Droveway, replies with a version that was not offered, or with an unknown
    /// status.
    pub fn parse(bytes: &[u8; Self::BYTES], offered: Versions) -> Result<(Self, u16), WireError> {
        check_magic(bytes)?;
        let version = le16(bytes, 8);
        let status = le16(bytes, 10);
        if status == 3 {
            return Ok((Self::OtherVersion(Versions::said(le16(bytes, 12), version)), version));
        }
        if !offered.contains(version) {
            return Err(WireError::Version { theirs: Versions::only(version), ours: offered });
        }
        let reply = match status {
            0 => Self::Welcome,
            1 => Self::UnknownToken,
            2 => Self::Busy,
            other => {
                return Err(WireError::Unknown { what: "status", value: u64::from(other) });
            }
        };
        Ok((reply, version))
    }
}

fn check_magic(bytes: &[u8]) -> Result<(), WireError> {
    let found: [u8; 8] = field(bytes, 0);
    if found == MAGIC { Ok(()) } else { Err(WireError::NotDroveway { found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: Versions = Versions::only(4);
    const BOTH: Versions = Versions { oldest: 4, newest: 5 };
    const FIVE: Versions = Versions::only(5);

    fn offer(versions: Versions) -> [u8; Preamble::BYTES] {
        Preamble { kind: Kind::Control, versions }.to_bytes()
    }

    #[test]
    fn preambles_and_replies_round_trip() {
        let lane = Kind::Lane { number: 7, token: Token([9; 16]) };
        for kind in [Kind::Control, lane, Kind::Inquiry, Kind::Orders] {
            let bytes = Preamble { kind, versions: BOTH }.to_bytes();
            assert_eq!(Preamble::parse(&bytes, FOUR).unwrap(), (kind, 4));
            assert_eq!(Preamble::parse(&bytes, BOTH).unwrap(), (kind, 5));
        }
        for reply in [Reply::Welcome, Reply::UnknownToken, Reply::Busy] {
            assert_eq!(Reply::parse(&reply.to_bytes(4), BOTH).unwrap(), (reply, 4));
        }
        let other = Reply::OtherVersion(BOTH);
        assert_eq!(Reply::parse(&other.to_bytes(0), FIVE).unwrap(), (other, 5));
    }

    #[test]
    fn two_agents_speak_the_newest_that_both_know() {
        for (ours, theirs, common) in [
            (FOUR, FOUR, Some(4)),
            (FOUR, BOTH, Some(4)),
            (BOTH, BOTH, Some(5)),
            (BOTH, FIVE, Some(5)),
            (FOUR, FIVE, None),
        ] {
            assert_eq!((ours.common(theirs), theirs.common(ours)), (common, common));
            let received = Preamble::parse(&offer(theirs), ours);
            assert_eq!(received.ok().map(|(_, version)| version), common);
        }
    }

    /// Release 0.1.0 leaves `oldest` zero at both ends, and reads replies of version 4 only.
    #[test]
    fn the_previous_release_is_understood() {
        let mut bytes = offer(FOUR);
        bytes[14..16].fill(0);
        assert_eq!(Preamble::parse(&bytes, BOTH).unwrap(), (Kind::Control, 4));
        assert_eq!(Reply::Welcome.to_bytes(4)[8..10], [4, 0]);
        let mut refusal = Reply::OtherVersion(FOUR).to_bytes(4);
        refusal[12..16].fill(0);
        assert_eq!(Reply::parse(&refusal, BOTH).unwrap().0, Reply::OtherVersion(FOUR));
    }

    #[test]
    fn a_stranger_and_another_version_are_told_apart() {
        let mut bytes = offer(FIVE);
        let error = Preamble::parse(&bytes, FOUR).unwrap_err();
        assert!(matches!(error, WireError::Version { theirs: FIVE, ours: FOUR }), "{error}");
        assert!(error.to_string().contains("has version 5 of"), "{error}");
        // A version that was not offered is refused.
        let error = Reply::parse(&Reply::Welcome.to_bytes(5), FOUR).unwrap_err();
        assert!(matches!(error, WireError::Version { .. }), "{error}");
        bytes[0] = b'G';
        let error = Preamble::parse(&bytes, FOUR).unwrap_err();
        assert!(matches!(error, WireError::NotDroveway { .. }));
    }
}
