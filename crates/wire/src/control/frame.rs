//! Frames of a control connection: messages, and the non-RAM stream between them.
//!
//! ```text
//! 0 length u32 (of what follows the kind)   4 kind u8   5 content
//! ```

use std::io::{Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::WireError;
use crate::read::le32;

/// The longest message. The shape of a VM with hundreds of devices has some 100 KiB.
const MESSAGE_BYTES_MAX: u64 = 2 << 20;
/// The most values in a message, which limits its memory when it is read: a number is two bytes in
/// JSON and 32 in memory, a field of an object over 100. The shape of a VM with hundreds of devices
/// has some thousands.
const MESSAGE_VALUES_MAX: u64 = 1 << 17;
/// The longest piece of the non-RAM stream in a frame. A VM's head (its block list) has some KiB,
/// or below 1 MiB with a thousand blocks; the tail is cut into pieces.
const NON_RAM_BYTES_MAX: u64 = 4 << 20;

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message as JSON.
    Message(Vec<u8>),
    /// The head of the non-RAM stream.
    Head(Vec<u8>),
    /// A piece of its tail.
    Tail(Vec<u8>),
    /// A piece of a stream that could not be split. If empty, the end of a relayed stream.
    Whole(Vec<u8>),
    /// From the destination: what its QEMU or disk server wrote. If empty, it has closed.
    Back(Vec<u8>),
}

/// The header before a frame's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    kind: u8,
    content_bytes: u32,
}

impl FrameHeader {
    /// Its length on the wire.
    pub const BYTES: usize = 5;

    /// Parses a peer's bytes.
    ///
    /// # Errors
    /// If the kind is unknown, or the length is above the kind's cap.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        let header = Self { content_bytes: le32(bytes, 0), kind: bytes[4] };
        let (what, max) = match header.kind {
            0 => ("a message", MESSAGE_BYTES_MAX),
            1..=4 => ("a piece of the non-RAM stream", NON_RAM_BYTES_MAX),
            other => {
                return Err(WireError::Unknown { what: "kind of frame", value: u64::from(other) });
            }
        };
        let value = u64::from(header.content_bytes);
        if value > max {
            return Err(WireError::TooLarge { what, value, max });
        }
        Ok(header)
    }
}

impl Frame {
    /// A message as a frame.
    ///
    /// # Errors
    /// If it can't be serialized or is too long, which is our own error.
    pub fn message<M: Serialize>(message: &M) -> Result<Self, WireError> {
        Ok(Self::Message(serde_json::to_vec(message)?))
    }

    fn parts(&self) -> (u8, &[u8]) {
        match self {
            Self::Message(content) => (0, content),
            Self::Head(content) => (1, content),
            Self::Tail(content) => (2, content),
            Self::Whole(content) => (3, content),
            Self::Back(content) => (4, content),
        }
    }

    /// Writes it in one piece.
    ///
    /// # Errors
    /// If it is longer than a peer would accept, or the writer fails.
    pub fn write_to(&self, out: &mut impl Write) -> Result<(), WireError> {
        let (kind, content) = self.parts();
        write_frame(kind, content, out)
    }

    /// Writes `bytes` as [`Frame::Back`] frames, without a copy.
    ///
    /// # Errors
    /// If the writer fails.
    pub fn write_back(bytes: &[u8], out: &mut impl Write) -> Result<(), WireError> {
        bytes.chunks(1 << 20).try_for_each(|piece| write_frame(4, piece, out))
    }

    /// Writes a part of the non-RAM stream as [`Frame::Tail`] (or `whole`, [`Frame::Whole`])
    /// frames, without a copy.
    ///
    /// # Errors
    /// If the writer fails.
    pub fn write_non_ram(whole: bool, bytes: &[u8], out: &mut impl Write) -> Result<(), WireError> {
        for piece in bytes.chunks(1 << 20) {
            write_frame(if whole { 3 } else { 2 }, piece, out)?;
        }
        Ok(())
    }
}

fn write_frame(kind: u8, content: &[u8], out: &mut impl Write) -> Result<(), WireError> {
    let content_bytes = u32::try_from(content.len()).unwrap_or(u32::MAX);
    let mut header = [0; FrameHeader::BYTES];
    header[..4].copy_from_slice(&content_bytes.to_le_bytes());
    header[4] = kind;
    FrameHeader::parse(&header)?;
    out.write_all(&header)?;
    out.write_all(content)?;
    Ok(out.flush()?)
}

/// Reads the message of a frame.
///
/// # Errors
/// If it is not such a message, or has more values than any message.
pub fn read_message<M: DeserializeOwned>(json: &[u8]) -> Result<M, WireError> {
    // One of these precedes any value but the first; texts may contain them too.
    let marks = json.iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count() as u64;
    if marks > MESSAGE_VALUES_MAX {
        let what = "a message with a number of values";
        return Err(WireError::TooLarge { what, value: marks, max: MESSAGE_VALUES_MAX });
    }
    Ok(serde_json::from_slice(json)?)
}

/// Reads one frame. `None` if the peer closed the connection between frames.
///
/// # Errors
/// If the connection breaks or the peer violates the protocol.
pub fn read_frame(from: &mut impl Read) -> Result<Option<Frame>, WireError> {
    let mut header = [0; FrameHeader::BYTES];
    let first = from.read(&mut header)?;
    if first == 0 {
        return Ok(None);
    }
    from.read_exact(&mut header[first..])?;
    let header = FrameHeader::parse(&header)?;
    let mut content = vec![0; header.content_bytes as usize];
    from.read_exact(&mut content)?;
    Ok(Some(match header.kind {
        0 => Frame::Message(content),
        1 => Frame::Head(content),
        2 => Frame::Tail(content),
        3 => Frame::Whole(content),
        _ => Frame::Back(content),
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_length_above_the_cap_is_refused_before_anything_is_allocated() {
        let error = read_frame(&mut [0xff, 0xff, 0xff, 0xff, 2].as_slice()).unwrap_err();
        assert!(matches!(error, WireError::TooLarge { .. }), "{error}");
    }

    /// A message that is short on the wire must not be large in memory.
    #[test]
    fn a_message_of_very_many_values_is_refused() {
        let numbers = |count: usize| format!("[0{}]", ",0".repeat(count - 1)).into_bytes();
        let few: Vec<u8> = read_message(&numbers(1000)).unwrap();
        assert_eq!(few.len(), 1000);
        let error = read_message::<serde_json::Value>(&numbers(1 << 18)).unwrap_err();
        assert!(matches!(error, WireError::TooLarge { .. }), "{error}");
        let deep = "[".repeat(1 << 16).into_bytes();
        let error = read_message::<serde_json::Value>(&deep).unwrap_err();
        assert!(matches!(error, WireError::Message(_)), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = bytes.as_slice();
            while let Ok(Some(_)) = read_frame(&mut rest) {}
        }
    }
}
