//! Records from the peer: sealed bytes in, opened bytes out. No I/O.

use std::sync::{Arc, LazyLock};

use page::{Borrowed, Buffer, Reserve};

use crate::keys::Keys;
use crate::messages::Messages;
use crate::record::{
    CONTENT_BYTES_MAX, HEADER_BYTES, Kind, RECORD_BYTES_MAX, RecordError, TrafficKey, inner_bytes,
    sealed_bytes,
};
use crate::refusal::Refusal;

/// Size at first: a control connection or a lane's acknowledgements need no
/// more.
const BUFFER_BYTES_MIN: usize = 2 * RECORD_BYTES_MAX;
/// As much as is worth one system call, and still in a core's own cache
/// when it is opened: about a lane's batch.
const BUFFER_BYTES_MAX: usize = 512 << 10;
/// The most that all connections of a process receive into, beyond the size at first: as much as
/// the lanes of 16 VMs with 8 lanes each. Those that get no more take more system calls.
const ALL_BYTES_MAX: usize = 128 * BUFFER_BYTES_MAX;
static ALL: LazyLock<Arc<Reserve>> = LazyLock::new(|| Reserve::new(ALL_BYTES_MAX));
/// Least room that is worth a system call.
const ROOM_BYTES_MIN: usize = 4 * CONTENT_BYTES_MAX;
/// Most records in a row without data: tickets after a handshake are 16.
const IDLE_MAX: u32 = 64;
/// The description in an alert, its second byte after the level, of an orderly end.
const CLOSE_NOTIFY: u8 = 0;

/// Received bytes that are sealed, or opened and not yet taken.
pub(crate) struct Inbox {
    key: TrafficKey,
    // Freed before others are promised its memory.
    buffer: Buffer,
    memory: Borrowed,
    /// Opened, not taken: `buffer[opened.0..opened.1]`.
    opened: (usize, usize),
    /// Sealed: `buffer[sealed.0..sealed.1]`.
    sealed: (usize, usize),
    messages: Messages,
    idle: u32,
    /// Why there is nothing more to take.
    end: Option<Result<(), RecordError>>,
}

/// What [`Inbox::take`] has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// That many bytes, at least one.
    Bytes(usize),
    /// Nothing until more is received.
    Nothing,
    /// Nothing any more: the peer has ended the connection in order.
    Ended,
}

impl Inbox {
    /// `came` is what was received after the handshake.
    pub(crate) fn new(key: TrafficKey, came: &[u8]) -> Self {
        Self::within(&ALL, key, came)
    }

    fn within(reserve: &Arc<Reserve>, key: TrafficKey, came: &[u8]) -> Self {
        let mut buffer = Buffer::new(BUFFER_BYTES_MIN + came.len());
        buffer[..came.len()].copy_from_slice(came);
        Self {
            key,
            memory: Borrowed::new(reserve, buffer.len()),
            buffer,
            opened: (0, 0),
            sealed: (0, came.len()),
            messages: Messages::default(),
            idle: 0,
            end: None,
        }
    }

    /// Opens received records into `into`, as much as fits; without a copy when a
    /// whole record fits.
    pub(crate) fn take(&mut self, into: &mut [u8], keys: &Keys) -> Result<Taken, RecordError> {
        let mut taken = self.take_opened(into);
        while taken < into.len() && self.end.is_none() {
            match self.open_next(&mut into[taken..], keys) {
                Ok(Some(bytes)) => taken += bytes,
                Ok(None) => break,
                Err(error) => self.end = Some(Err(error)),
            }
            taken += self.take_opened(&mut into[taken..]);
        }
        match self.end {
            _ if taken > 0 => Ok(Taken::Bytes(taken)),
            None => Ok(Taken::Nothing),
            Some(Ok(())) => Ok(Taken::Ended),
            Some(Err(error)) => Err(error),
        }
    }

    fn take_opened(&mut self, into: &mut [u8]) -> usize {
        let (start, end) = self.opened;
        let count = (end - start).min(into.len());
        into[..count].copy_from_slice(&self.buffer[start..start + count]);
        self.opened.0 += count;
        count
    }

    /// Opens the next record, if it is complete. Returns how many bytes it put into
    /// `into`: none if it opened the record in place, or the record has no data.
    fn open_next(&mut self, into: &mut [u8], keys: &Keys) -> Result<Option<usize>, RecordError> {
        let (start, end) = self.sealed;
        let came = &mut self.buffer[start..end];
        let Some((header, came)) = came.split_first_chunk_mut::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = *header;
        let Some(sealed) = came.get_mut(..sealed_bytes(header)?) else { return Ok(None) };
        let content_at = start + HEADER_BYTES;
        self.sealed.0 = content_at + sealed.len();

        let mut placed = None;
        let (kind, bytes) = match into.get_mut(..inner_bytes(sealed.len())) {
            Some(into) => {
                let opened = self.key.open(header, sealed, into)?;
                placed = Some(into);
                opened
            }
            None => self.key.open_in_place(header, sealed)?,
        };
        if kind == Kind::Data && !self.messages.is_within() {
            self.count_idle(bytes > 0)?;
            if placed.is_none() {
                self.opened = (content_at, content_at + bytes);
                return Ok(Some(0));
            }
            return Ok(Some(bytes));
        }
        let content = match placed {
            Some(into) => &into[..bytes],
            None => &self.buffer[content_at..content_at + bytes],
        };
        match (kind, content) {
            (Kind::Handshake, content) if !content.is_empty() => {
                self.messages.take(content, keys, &mut self.key)?;
            }
            (Kind::Alert, [_, CLOSE_NOTIFY]) => self.end = Some(Ok(())),
            (Kind::Alert, [_, says]) => return Err(Refusal(*says).into()),
            (kind, _) => return Err(RecordError::Kind(kind.code())),
        }
        self.count_idle(false)?;
        Ok(Some(0))
    }

    /// Limits records without data, with which a peer could keep this end busy.
    fn count_idle(&mut self, brings_bytes: bool) -> Result<(), RecordError> {
        self.idle = if brings_bytes { 0 } else { self.idle + 1 };
        if self.idle > IDLE_MAX { Err(RecordError::Idle) } else { Ok(()) }
    }

    /// Room for the next bytes from the peer: never empty. To be called only when
    /// there is nothing to take.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let (start, end) = self.sealed;
        if start == end {
            self.sealed = (0, 0);
        } else if self.buffer.len() - end < ROOM_BYTES_MIN {
            self.buffer.copy_within(start..end, 0);
            self.sealed = (0, end - start);
        }
        self.opened = (0, 0);
        &mut self.buffer[self.sealed.1..]
    }

    /// Adds `bytes` that were received into the room.
    pub(crate) fn came(&mut self, bytes: usize) {
        self.sealed.1 = (self.sealed.1 + bytes).min(self.buffer.len());
        // A peer that fills the buffer at once has more to send.
        let larger = (self.buffer.len() * 2).min(BUFFER_BYTES_MAX);
        if self.sealed.1 == self.buffer.len()
            && self.buffer.len() < larger
            && self.memory.grow_to(larger)
        {
            let mut larger = Buffer::new(larger);
            larger[..self.buffer.len()].copy_from_slice(&self.buffer);
            self.buffer = larger;
        }
    }

    /// Whether it takes more memory than a silent peer needs.
    pub(crate) fn is_large(&self) -> bool {
        self.buffer.len() > BUFFER_BYTES_MIN
    }

    /// Gives that memory back. To be called only when there is nothing to take.
    pub(crate) fn shrink(&mut self) {
        let (start, end) = self.sealed;
        let mut smaller = Buffer::new(BUFFER_BYTES_MIN);
        // At most a record that is not complete.
        let Some(kept) = smaller.get_mut(..end - start) else { return };
        kept.copy_from_slice(&self.buffer[start..end]);
        (self.opened, self.sealed) = ((0, 0), (0, end - start));
        self.buffer = smaller;
        self.memory.shrink_to(BUFFER_BYTES_MIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::key;

    /// As if its peer sent much, and all of it was taken.
    fn fill(inbox: &mut Inbox) {
        for _ in 0..8 {
            let bytes = inbox.room().len();
            inbox.came(bytes);
            inbox.sealed.0 = inbox.sealed.1;
        }
    }

    #[test]
    fn all_together_have_so_much_to_receive_into_and_no_more() {
        let reserve = Reserve::new(2 * BUFFER_BYTES_MAX);
        let inbox = |_| Inbox::within(&reserve, key(), &[]);
        let mut inboxes: Vec<Inbox> = (0..8).map(inbox).collect();
        inboxes.iter_mut().for_each(fill);
        let bytes: usize = inboxes.iter().map(|inbox| inbox.buffer.len()).sum();
        assert!(bytes <= reserve.bytes() + 8 * BUFFER_BYTES_MIN, "{bytes}");
        assert_eq!(inboxes[0].buffer.len(), BUFFER_BYTES_MAX);
        assert!(!inboxes[7].is_large() && !inboxes[7].room().is_empty());
        // One that is silent leaves its part to others, and keeps what it has of a record.
        inboxes[0].room()[..3].copy_from_slice(&[23, 3, 3]);
        inboxes[0].came(3);
        inboxes[0].shrink();
        assert_eq!((&inboxes[0].buffer[..3], inboxes[0].sealed), (&[23, 3, 3][..], (0, 3)));
        fill(&mut inboxes[7]);
        assert_eq!(inboxes[7].buffer.len(), BUFFER_BYTES_MAX);
        drop(inboxes);
        assert_eq!(reserve.borrowed_bytes(), 0);
    }
}
