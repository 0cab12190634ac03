//! PAGE_DATA records.

use page::{Epoch, PAGE_BYTES};

use super::{Halt, Part, Position, Sink, Splitter};
use crate::cursor::Cursor;
use crate::record::{PAGE_DATA_HEAD_BYTES, RECORD_HEAD_BYTES, WORD_BYTES};
use crate::{PageWord, RECORD_PAGES_MAX, StreamError};

impl Splitter {
    /// Takes the first numbers of a PAGE_DATA record. The receiver gets records of its own, so all
    /// of this one must be understood.
    pub(super) fn page_data(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        let mut cursor = Cursor::over(rest, RECORD_HEAD_BYTES + PAGE_DATA_HEAD_BYTES)?;
        let (_kind, bytes) = (cursor.le_u32()?, cursor.le_u32()?);
        let (count, reserved) = (cursor.le_u32()?, cursor.le_u32()?);
        if reserved != 0 {
            return Err(StreamError::Reserved.into());
        }
        if count == 0 || count as usize > RECORD_PAGES_MAX {
            return Err(StreamError::PageCount { count }.into());
        }
        let table_bytes = PAGE_DATA_HEAD_BYTES + count as usize * WORD_BYTES;
        let body_bytes = (bytes as usize).checked_sub(table_bytes);
        let whole = body_bytes.filter(|it| it.is_multiple_of(PAGE_BYTES));
        let bodies = whole.ok_or(StreamError::PageDataBytes { count, bytes })? / PAGE_BYTES;
        self.words.clear();
        self.position = Position::Words { count, bodies };
        Ok(RECORD_HEAD_BYTES + PAGE_DATA_HEAD_BYTES)
    }

    pub(super) fn take_words(
        &mut self,
        rest: &[u8],
        at: &mut usize,
        count: u32,
        bodies: usize,
    ) -> Result<(), Halt> {
        let missing = count as usize - self.words.len();
        let (words, _) = rest.as_chunks::<WORD_BYTES>();
        for word in words.iter().take(missing) {
            self.words.push(PageWord::parse(u64::from_le_bytes(*word))?);
            *at += WORD_BYTES;
        }
        if words.len() < missing {
            return Err(Halt::Short(WORD_BYTES));
        }
        if self.words.iter().filter(|word| word.kind.has_body()).count() != bodies {
            let table_bytes = PAGE_DATA_HEAD_BYTES + self.words.len() * WORD_BYTES;
            let bytes = u32::try_from(table_bytes + bodies * PAGE_BYTES).unwrap_or(u32::MAX);
            return Err(StreamError::PageDataBytes { count, bytes }.into());
        }
        self.position = Position::Pages { nth: 0 };
        Ok(())
    }

    pub(super) fn take_pages<S: Sink>(
        &mut self,
        mut nth: usize,
        input: &[u8],
        at: &mut usize,
        sink: &mut S,
    ) -> Result<(), Halt> {
        while let Some(&word) = self.words.get(nth) {
            let body = word.kind.has_body().then_some(*at);
            if body.is_some() && input.len() - *at < PAGE_BYTES {
                return Err(Halt::Short(PAGE_BYTES));
            }
            let number = u64::from(word.page.0);
            if number < self.floor {
                self.epoch = self.next_epoch()?;
                sink.epoch(self.epoch, self.non_ram_bytes);
                self.floor = 0;
            }
            if sink.page(word, body).is_break() {
                return Err(Halt::Paused);
            }
            self.floor = number + 1;
            *at += body.map_or(0, |_| PAGE_BYTES);
            nth += 1;
            self.position = Position::Pages { nth };
        }
        self.position = Position::Before(Part::LibxcRecord);
        Ok(())
    }

    fn next_epoch(&self) -> Result<Epoch, StreamError> {
        self.epoch.0.checked_add(1).map(Epoch).ok_or(StreamError::TooManyPasses)
    }
}
