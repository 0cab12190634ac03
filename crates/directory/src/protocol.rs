//! The protocol of a connection to a directory, as bytes: no I/O.
//!
//! ```text
//! request  0 magic d7d1 u16   2 kind u8   3 host bytes u8   4 id u32
//!          8 names u16       10 0 u16    12 wait ms u32
//!          host, then names x [20]
//! reply    0 magic d7d2 u16   2 status u8   3 0 u8   4 id u32
//!          8 answers u16     10 hosts u16  12 table bytes u32
//!          table: hosts x { bytes u8, name }, or a refusal's text
//!          answers x u16: 0 yours, else bit 15 coming or held, the rest 1 + a host's place
//! ```
//! All numbers are little-endian. Requests and replies may be pipelined; a reply has its
//! request's id. Lengths are checked before anything is allocated by them.

use std::time::Duration;

use content::{NAME_BYTES, Name};
use identity::{LETTERS_MAX, NameError};

use crate::directory::Answer;
use crate::host::HostName;

/// The most names in a request: eight batches' worth.
pub const NAMES_MAX: usize = 1024;
/// The longest wait that a directory accepts in a request.
pub const WAIT_MAX: Duration = Duration::from_secs(60);
/// The size of a request's or a reply's header.
pub const HEADER_BYTES: usize = 16;
/// The most bytes of a refusal's text.
const TEXT_BYTES_MAX: usize = 1024;

const REQUEST_MAGIC: u16 = 0xd7d1;
const REPLY_MAGIC: u16 = 0xd7d2;
const CODE_BYTES: usize = 2;
const COMING: u16 = 1 << 15;
const _: () = assert!(NAMES_MAX < COMING as usize, "a host's place fits beside the bit");

/// How the peer broke the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// A count or length above what the protocol allows.
    #[error("{what} of {value}, where {max} is the most")]
    TooLarge {
        /// The field.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The most that is allowed.
        max: usize,
    },
    /// A field with an unknown value.
    #[error("an unknown {what} ({value})")]
    Unknown {
        /// Which field.
        what: &'static str,
        /// Its value.
        value: u16,
    },
    /// Fields that contradict each other.
    #[error("{0}")]
    Contradiction(&'static str),
    /// An invalid host name.
    #[error(transparent)]
    Host(#[from] NameError),
}

/// The kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// As `Directory::claim`.
    Claim,
    /// As `Directory::hold`.
    Hold,
    /// As `Directory::release`.
    Release,
    /// As `Directory::forget`; it has no names.
    Forget,
}

impl RequestKind {
    const ALL: [(Self, u8); 4] =
        [(Self::Claim, 1), (Self::Hold, 2), (Self::Release, 3), (Self::Forget, 4)];

    fn code(self) -> u8 {
        let of = Self::ALL.iter().find(|(kind, _)| *kind == self);
        of.map_or(0, |(_, code)| *code)
    }

    fn from_code(code: u8) -> Result<Self, ProtocolError> {
        let of = Self::ALL.iter().find(|(_, other)| *other == code);
        let unknown = ProtocolError::Unknown { what: "kind of request", value: u16::from(code) };
        of.map(|(kind, _)| *kind).ok_or(unknown)
    }
}

/// The header before a request's host and names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// The kind of request.
    pub kind: RequestKind,
    /// The id of its reply.
    pub id: u32,
    /// How long the client will wait.
    pub wait: Duration,
    host_bytes: usize,
    names: usize,
}

impl RequestHeader {
    /// Parses a peer's bytes.
    ///
    /// # Errors
    /// If they are no valid header, or a length is above its cap.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, ProtocolError> {
        check_magic(bytes, REQUEST_MAGIC, "prefix of a request")?;
        let header = Self {
            kind: RequestKind::from_code(bytes[2])?,
            id: le32(bytes, 4),
            wait: Duration::from_millis(u64::from(le32(bytes, 12))).min(WAIT_MAX),
            host_bytes: usize::from(bytes[3]),
            names: usize::from(le16(bytes, 8)),
        };
        cap("a host's name", header.host_bytes, LETTERS_MAX)?;
        cap("a number of names", header.names, NAMES_MAX)?;
        if header.kind == RequestKind::Forget && header.names > 0 {
            return Err(ProtocolError::Contradiction("a host is forgotten whole"));
        }
        Ok(header)
    }

    /// The size of the body.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.host_bytes + self.names * NAME_BYTES
    }

    /// Reads the body, [`Self::body_bytes`] long: the names into `names`. Returns the host.
    ///
    /// # Errors
    /// If the host name is invalid, or the length is wrong.
    pub fn read_body(&self, body: &[u8], names: &mut Vec<Name>) -> Result<HostName, ProtocolError> {
        names.clear();
        let parts = body.split_at_checked(self.host_bytes);
        let (host, rest) = parts.ok_or(ProtocolError::Contradiction("a request cut short"))?;
        let (all, rest) = rest.as_chunks::<NAME_BYTES>();
        if all.len() != self.names || !rest.is_empty() {
            return Err(ProtocolError::Contradiction("another number of names than announced"));
        }
        names.extend(all.iter().map(|name| Name(*name)));
        Ok(HostName::from_bytes(host)?)
    }
}

/// The size of a request.
#[must_use]
pub fn request_bytes(host: &HostName, names: &[Name]) -> usize {
    HEADER_BYTES + host.as_str().len() + names.len() * NAME_BYTES
}

/// Appends a request to `out`.
///
/// # Panics
/// If there are more than [`NAMES_MAX`] names.
pub fn write_request(
    kind: RequestKind,
    id: u32,
    host: &HostName,
    names: &[Name],
    wait: Duration,
    out: &mut Vec<u8>,
) {
    assert!(names.len() <= NAMES_MAX, "a request has {NAMES_MAX} names at most");
    out.reserve(request_bytes(host, names));
    let host = host.as_str().as_bytes();
    out.extend_from_slice(&REQUEST_MAGIC.to_le_bytes());
    out.extend_from_slice(&[kind.code(), u8::try_from(host.len()).expect("LETTERS_MAX is less")]);
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&u16::try_from(names.len()).expect("capped").to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    let wait_ms = u32::try_from(wait.min(WAIT_MAX).as_millis()).expect("WAIT_MAX is less");
    out.extend_from_slice(&wait_ms.to_le_bytes());
    out.extend_from_slice(host);
    names.iter().for_each(|name| out.extend_from_slice(&name.0));
}

/// The header before a reply's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHeader {
    /// Its request's id.
    pub id: u32,
    is_refusal: bool,
    answers: usize,
    hosts: usize,
    table_bytes: usize,
}

impl ReplyHeader {
    /// Parses a peer's bytes.
    ///
    /// # Errors
    /// If they are no valid header, or a length is above its cap.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, ProtocolError> {
        check_magic(bytes, REPLY_MAGIC, "prefix of a reply")?;
        if bytes[2] > 1 {
            let value = u16::from(bytes[2]);
            return Err(ProtocolError::Unknown { what: "status", value });
        }
        let header = Self {
            id: le32(bytes, 4),
            is_refusal: bytes[2] == 1,
            answers: usize::from(le16(bytes, 8)),
            hosts: usize::from(le16(bytes, 10)),
            table_bytes: usize::try_from(le32(bytes, 12)).unwrap_or(usize::MAX),
        };
        cap("a number of answers", header.answers, NAMES_MAX)?;
        cap("a number of hosts", header.hosts, header.answers)?;
        if !header.is_refusal {
            cap("a table of hosts", header.table_bytes, header.hosts * (1 + LETTERS_MAX))?;
        } else if header.answers > 0 {
            return Err(ProtocolError::Contradiction("a refusal with answers"));
        }
        cap("a text", if header.is_refusal { header.table_bytes } else { 0 }, TEXT_BYTES_MAX)?;
        Ok(header)
    }

    /// The size of the body.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.table_bytes + self.answers * CODE_BYTES
    }

    /// The refusal's text, if it is one.
    #[must_use]
    pub fn refusal(&self, body: &[u8]) -> Option<String> {
        self.is_refusal.then(|| String::from_utf8_lossy(body).into_owned())
    }

    /// Reads the body, [`Self::body_bytes`] long, into `answers`.
    ///
    /// # Errors
    /// If the body is invalid.
    pub fn read_body(&self, body: &[u8], answers: &mut Vec<Answer>) -> Result<(), ProtocolError> {
        answers.clear();
        let parts = body.split_at_checked(self.table_bytes);
        let (table, codes) = parts.ok_or(ProtocolError::Contradiction("a reply cut short"))?;
        let hosts = self.read_table(table)?;
        let (codes, rest) = codes.as_chunks::<CODE_BYTES>();
        if codes.len() != self.answers || !rest.is_empty() {
            return Err(ProtocolError::Contradiction("another number of answers than announced"));
        }
        answers.reserve(codes.len());
        for code in codes {
            let code = u16::from_le_bytes(*code);
            let Some(place) = usize::from(code & !COMING).checked_sub(1) else {
                if code != 0 {
                    return Err(ProtocolError::Contradiction("content for no host"));
                }
                answers.push(Answer::Yours);
                continue;
            };
            let unknown = ProtocolError::Unknown { what: "host's place", value: code };
            let host = hosts.get(place).ok_or(unknown)?.clone();
            let is_coming = code & COMING != 0;
            answers.push(if is_coming { Answer::Coming(host) } else { Answer::Held(host) });
        }
        Ok(())
    }

    fn read_table(&self, table: &[u8]) -> Result<Vec<HostName>, ProtocolError> {
        let mut hosts = Vec::with_capacity(self.hosts);
        let mut rest = table;
        while let Some((bytes, after)) = rest.split_first() {
            let parts = after.split_at_checked(usize::from(*bytes));
            let (host, after) = parts.ok_or(ProtocolError::Contradiction("a host cut short"))?;
            hosts.push(HostName::from_bytes(host)?);
            rest = after;
        }
        if hosts.len() != self.hosts {
            return Err(ProtocolError::Contradiction("another number of hosts than announced"));
        }
        Ok(hosts)
    }
}

/// Appends the answers to a claim to `out`. Other requests have none.
///
/// # Panics
/// If there are more than [`NAMES_MAX`].
pub fn write_answers(id: u32, answers: &[Answer], out: &mut Vec<u8>) {
    assert!(answers.len() <= NAMES_MAX, "a request has {NAMES_MAX} names at most");
    let mut hosts: Vec<&HostName> = Vec::new();
    let mut table = Vec::new();
    let mut place = |host| {
        // There are few hosts, and mostly the last one repeats.
        let known = hosts.iter().rposition(|other| *other == host);
        let place = known.unwrap_or_else(|| {
            hosts.push(host);
            let letters = host.as_str().as_bytes();
            table.push(u8::try_from(letters.len()).expect("LETTERS_MAX is less"));
            table.extend_from_slice(letters);
            hosts.len() - 1
        });
        u16::try_from(place + 1).expect("no more hosts than answers")
    };
    let codes: Vec<u16> = answers
        .iter()
        .map(|answer| match answer {
            Answer::Yours => 0,
            Answer::Held(host) => place(host),
            Answer::Coming(host) => COMING | place(host),
        })
        .collect();
    write_reply_header(id, 0, [codes.len(), hosts.len(), table.len()], out);
    out.extend_from_slice(&table);
    codes.iter().for_each(|code| out.extend_from_slice(&code.to_le_bytes()));
}

/// Appends a refusal of a request, and its reason, to `out`.
pub fn write_refusal(id: u32, why: &str, out: &mut Vec<u8>) {
    let mut ends = (0..=why.len().min(TEXT_BYTES_MAX)).rev();
    let end = ends.find(|end| why.is_char_boundary(*end)).unwrap_or(0);
    let text = &why[..end];
    write_reply_header(id, 1, [0, 0, text.len()], out);
    out.extend_from_slice(text.as_bytes());
}

fn write_reply_header(
    id: u32,
    status: u8,
    [answers, hosts, table_bytes]: [usize; 3],
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(&REPLY_MAGIC.to_le_bytes());
    out.extend_from_slice(&[status, 0]);
    out.extend_from_slice(&id.to_le_bytes());
    for count in [answers, hosts] {
        out.extend_from_slice(&u16::try_from(count).expect("NAMES_MAX is less").to_le_bytes());
    }
    let table_bytes = u32::try_from(table_bytes).expect("NAMES_MAX times LETTERS_MAX is less");
    out.extend_from_slice(&table_bytes.to_le_bytes());
}

fn check_magic(
    bytes: &[u8; HEADER_BYTES],
    magic: u16,
    what: &'static str,
) -> Result<(), ProtocolError> {
    let value = le16(bytes, 0);
    if value == magic { Ok(()) } else { Err(ProtocolError::Unknown { what, value }) }
}

fn cap(what: &'static str, value: usize, max: usize) -> Result<(), ProtocolError> {
    if value > max { Err(ProtocolError::TooLarge { what, value, max }) } else { Ok(()) }
}

/// Reads a field at a fixed offset, so never past the header's end.
fn le16(bytes: &[u8; HEADER_BYTES], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn le32(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests;
