//! The agent's side: reads an answer piece by piece, within every bound.

use crate::code::Cursor;
use crate::frame::{CONTENT_BYTES_MAX, Header, Kind};
use crate::run::Last;
use crate::{
    AnswerKind, CacheMap, DEVICES_MAX, Device, Fault, Greeting, PAGE_SECTORS, Query, Run, Summary,
    VERSION, write,
};

/// The most bytes before the greeting: what an earlier answer left in the port.
const LEFT_OVER_BYTES_MAX: u64 = 4 << 20;

/// The VM's sizes, which bound what its helper can report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The pages of its memory.
    pub ram_pages: u64,
    /// The first guest page number behind its memory. It is larger than the number of pages if
    /// memory has a gap for devices.
    pub end_page: u64,
}

impl Limits {
    /// Each page is reported once, or again if its content moves while the helper reports.
    fn pages_max(&self) -> u64 {
        self.ram_pages.saturating_mul(2)
    }
}

/// How much of an answer has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// No greeting yet.
    Waiting,
    /// There is a helper.
    Greeted,
    /// The answer is complete.
    Done,
}

/// Reads the answer to one query.
#[derive(Debug)]
pub struct Listener {
    query: Query,
    limits: Limits,
    bytes: u64,
    kept: Vec<u8>,
    unpacked: Vec<u8>,
    greeting: Option<Greeting>,
    sequence: u32,
    devices: Vec<Device>,
    runs: Vec<Run>,
    pages: u64,
    summary: Option<Summary>,
}

impl Listener {
    /// A listener for the answer to `query`, of a VM within `limits`.
    #[must_use]
    pub fn new(query: &Query, limits: Limits) -> Self {
        Self {
            query: *query,
            limits,
            bytes: 0,
            kept: Vec::new(),
            unpacked: Vec::new(),
            greeting: None,
            sequence: 0,
            devices: Vec::new(),
            runs: Vec::new(),
            pages: 0,
            summary: None,
        }
    }

    /// The query.
    #[must_use]
    pub fn query(&self) -> &Query {
        &self.query
    }

    /// The helper's greeting, once it has arrived.
    #[must_use]
    pub fn greeting(&self) -> Option<&Greeting> {
        self.greeting.as_ref()
    }

    /// Takes received bytes, in pieces of any size.
    ///
    /// # Errors
    /// If they break a rule: then nothing more is to be read.
    pub fn take(&mut self, bytes: &[u8]) -> Result<State, Fault> {
        self.bytes += bytes.len() as u64;
        let mut rest = bytes;
        // In pieces, so that no more than a frame is kept, however much has arrived.
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.len().min(CONTENT_BYTES_MAX));
            self.kept.extend_from_slice(piece);
            rest = after;
            if self.greeting.is_none() {
                self.look_for_greeting()?;
            }
            if self.greeting.is_some() {
                self.read_frames()?;
            }
        }
        Ok(self.state())
    }

    /// The map, if it is complete.
    #[must_use]
    pub fn into_map(self) -> Option<CacheMap> {
        Some(CacheMap::new(self.devices, self.runs, self.summary?))
    }

    /// How many runs have arrived so far, and their pages.
    #[must_use]
    pub fn received(&self) -> (usize, u64) {
        (self.runs.len(), self.pages)
    }

    /// The runs that have arrived after so many, as a map of their own.
    #[must_use]
    pub fn after(&self, runs: usize) -> CacheMap {
        let runs = self.runs.get(runs..).unwrap_or_default();
        CacheMap::new(self.devices.clone(), runs.to_vec(), Summary::default())
    }

    /// The helper's summary, once the answer is complete.
    #[must_use]
    pub fn summary(&self) -> Option<&Summary> {
        self.summary.as_ref()
    }

    fn state(&self) -> State {
        let greeting_only = self.query.answer == AnswerKind::Greeting;
        match (&self.greeting, &self.summary) {
            (None, _) => State::Waiting,
            (Some(_), None) if !greeting_only => State::Greeted,
            (Some(_), _) => State::Done,
        }
    }

    fn look_for_greeting(&mut self) -> Result<(), Fault> {
        if let Some((greeting, end)) = Greeting::find(&self.kept, self.query.nonce) {
            self.kept.drain(..end);
            let theirs = greeting.version;
            self.greeting = Some(greeting);
            // A greeting alone is accepted from any version.
            return if theirs == VERSION || self.query.answer == AnswerKind::Greeting {
                Ok(())
            } else {
                Err(Fault::OtherVersion { theirs })
            };
        }
        if self.bytes > LEFT_OVER_BYTES_MAX {
            return Err(Fault::NoGreeting { bytes: self.bytes });
        }
        let gone = self.kept.len().saturating_sub(Greeting::BYTES - 1);
        self.kept.drain(..gone);
        Ok(())
    }

    fn read_frames(&mut self) -> Result<(), Fault> {
        let kept = std::mem::take(&mut self.kept);
        let mut rest = &kept[..];
        while let Some((head, after)) = rest.split_first_chunk::<{ Header::BYTES }>() {
            if self.summary.is_some() {
                return Err(Fault::AfterEnd);
            }
            let header = Header::parse(head, self.sequence)?;
            let Some((content, after)) = after.split_at_checked(header.bytes) else { break };
            let mut room = std::mem::take(&mut self.unpacked);
            let content = header.unpack(self.query.nonce, head, content, &mut room)?;
            self.take_frame(header.kind, content)?;
            self.unpacked = room;
            self.sequence = self.sequence.wrapping_add(1);
            rest = after;
        }
        if self.summary.is_some() && !rest.is_empty() {
            return Err(Fault::AfterEnd);
        }
        self.kept = rest.to_vec();
        Ok(())
    }

    fn take_frame(&mut self, kind: Kind, content: &[u8]) -> Result<(), Fault> {
        match kind {
            Kind::Device if self.devices.len() == DEVICES_MAX => return Err(Fault::Devices),
            Kind::Device => self.devices.push(Device::read(content)?),
            Kind::Runs => self.take_runs(content)?,
            Kind::Summary => self.summary = Some(Summary::read(content)?),
            Kind::Refusal => {
                let mut cursor = Cursor(content);
                let text = cursor.text(write::TEXT_BYTES_MAX)?.to_owned();
                cursor.end()?;
                return Err(Fault::Refused { text });
            }
        }
        Ok(())
    }

    fn take_runs(&mut self, content: &[u8]) -> Result<(), Fault> {
        let (mut cursor, mut last) = (Cursor(content), Last::default());
        if cursor.is_empty() {
            return Err(Fault::Empty);
        }
        while !cursor.is_empty() {
            let run = last.read(&mut cursor)?;
            self.check(&run)?;
            self.pages += u64::from(run.pages);
            let pages_max = self.limits.pages_max();
            if self.pages > pages_max {
                return Err(Fault::Pages { pages_max });
            }
            if self.runs.len() as u64 >= u64::from(self.query.runs_max) {
                return Err(Fault::Runs { runs_max: self.query.runs_max });
            }
            self.runs.push(run);
        }
        Ok(())
    }

    fn check(&self, run: &Run) -> Result<(), Fault> {
        let Run { page, sector, device, .. } = *run;
        let pages = u64::from(run.pages);
        if pages == 0 {
            return Err(Fault::Empty);
        }
        if page.checked_add(pages).is_none_or(|end| end > self.limits.end_page) {
            return Err(Fault::OutsideRam { page, pages });
        }
        let known = self.devices.get(usize::from(device));
        let known = known.ok_or(Fault::Device { device: device.into() })?;
        if sector.checked_add(pages * PAGE_SECTORS).is_none_or(|end| end > known.sectors) {
            return Err(Fault::OutsideDisk { sector, pages });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
