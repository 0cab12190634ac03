//! Queries the guest's helper, and maps its answer to RAM blocks.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use cachemap::{Budget, CacheMap, End, Fault, Reason, Summary};
use data_threads::Joined;
use parking_lot::Mutex;
use qemu::guest_disks::{self, GuestDisk};
use qemu::guest_memory::GuestMemory;
use qemu::guest_port::{GuestError, HasGuest, Patience};

use super::GuestPageCache;
use super::map::{Map, Room, names_pages, stretches};
use crate::source::StorageNotes;

/// The longest wait for another user of the port.
const TURN_MAX: Duration = Duration::from_secs(5);

const NO_ROOM: &str = "only a part of what the guest's helper reports is read from storage: its \
                       report may take a quarter of this agent's buffers; a larger pool-mib allows \
                       more";

const NOWHERE: &str = "no page is read from storage: none that the guest's helper names was found \
                       in the VM's RAM";

/// The querying thread. Dropping it ends the thread.
pub struct GuestQuery {
    _thread: Joined,
    line: Arc<Line>,
}

impl GuestQuery {
    /// Queries the VM's helper: which pages of `blocks` are on `disks`, numbered in this order?
    /// The answer may cost the guest `budget` and this agent `room`. With `percent`, only
    /// that share of it is used.
    pub fn start(
        machine: Arc<dyn HasGuest>,
        disks: Vec<GuestDisk>,
        blocks: Vec<(String, u64)>,
        (budget, room): (Budget, Room),
        percent: Option<u8>,
        notes: &Arc<StorageNotes>,
    ) -> std::io::Result<(Self, Arc<GuestPageCache>)> {
        let (cached, line) = (Arc::<GuestPageCache>::default(), Arc::<Line>::default());
        let thread = data_threads::spawn("guest-query", {
            let notes = Arc::clone(notes);
            let (cached, line) = (Arc::clone(&cached), Arc::clone(&line));
            move || {
                let query = Query { machine: &*machine, disks: &disks, blocks, budget, percent };
                if let Err(why) = query.run(room, &line, &cached, &notes)
                    && !line.is_needless()
                    && machine.is_here()
                {
                    notes.note(cached.without_the_rest(&why));
                }
                cached.knows_all();
                line.close();
            }
        })?;
        Ok((Self { _thread: thread.into(), line }, cached))
    }

    /// Ends it without a note: the answer is not needed.
    pub fn cancel(self) {
        self.line.0.lock().is_needless = true;
    }
}

impl Drop for GuestQuery {
    fn drop(&mut self) {
        self.line.hang_up();
    }
}

/// The connection to the helper, whose owner may hang up at any time: also before there is one, or
/// the helper would be waited for as long as its budget lasts.
#[derive(Debug, Default)]
struct Line(Mutex<Connection>);

#[derive(Debug, Default)]
struct Connection {
    stream: Option<UnixStream>,
    is_over: bool,
    /// The answer is not needed.
    is_needless: bool,
}

impl Line {
    /// There is a connection. Fails if the owner has hung up.
    fn connect(&self, stream: &UnixStream) -> Result<(), String> {
        let mut line = self.0.lock();
        if line.is_over {
            return Err(GuestError::Closed.to_string());
        }
        line.stream = Some(stream.try_clone().map_err(|error| error.to_string())?);
        Ok(())
    }

    fn hang_up(&self) {
        let mut line = self.0.lock();
        line.is_over = true;
        if let Some(stream) = &line.stream {
            // The stream may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Closes the connection: QEMU serves one at a time, and the helper waits for its reader.
    fn close(&self) {
        drop(self.0.lock().stream.take());
    }

    fn is_needless(&self) -> bool {
        self.0.lock().is_needless
    }
}

/// The query, and the VM it goes to.
struct Query<'a> {
    machine: &'a dyn HasGuest,
    disks: &'a [GuestDisk],
    blocks: Vec<(String, u64)>,
    budget: Budget,
    percent: Option<u8>,
}

impl Query<'_> {
    fn run(
        &self,
        mut room: Room,
        line: &Line,
        cached: &GuestPageCache,
        notes: &StorageNotes,
    ) -> Result<(), String> {
        let Self { machine, blocks, budget, .. } = self;
        let said = |error: GuestError| {
            if is_of_a_helper(&error) {
                notes.helper_answers();
            }
            error.to_string()
        };
        let port = machine.open_guest_port(TURN_MAX).map_err(said)?;
        line.connect(&port.stream)?;
        let limits = machine.guest_limits()?;
        let known: Vec<_> = blocks.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
        let memory = machine.guest_memory(&known)?;
        let patience = Patience::of(*budget);
        let mut looked_at = 0;
        let (mut is_any_named, mut is_any_found) = (false, false);
        let mut understood = |part: CacheMap| {
            notes.helper_answers();
            let (map, is_named, unread) = self.understood(&part, &memory, looked_at);
            looked_at = part.devices().len();
            is_any_named |= is_named;
            is_any_found |= map.pages() > 0;
            unread.into_iter().for_each(|note| notes.note(note));
            map
        };
        let mut is_full = false;
        let mut learn = |map: Map| {
            let (map, is_all) = room.take(map);
            if !is_all && !std::mem::replace(&mut is_full, true) {
                notes.note(NO_ROOM);
            }
            cached.learn(map);
        };
        let summary = if let Some(percent) = self.percent {
            // Which pages are lowest on disk is known only at the end.
            let whole = port.query(limits, *budget, patience).map_err(said)?;
            let summary = whole.summary().clone();
            let mut map = understood(whole);
            map.cut(percent.into());
            learn(map);
            summary
        } else {
            let mut part = |part| learn(understood(part));
            let received = port.query_in_parts(limits, *budget, patience, &mut part);
            received.map_err(said)?
        };
        notes.helper_answers();
        if is_any_named && !is_any_found {
            notes.note(NOWHERE);
        }
        unfinished(&summary, budget.cpu_percent).into_iter().for_each(|note| notes.note(note));
        Ok(())
    }

    /// Converts a part to RAM blocks and disk numbers. Also returns whether it names pages of
    /// disks that are read, and why disks are not read, for those that earlier parts did not
    /// have.
    fn understood(
        &self,
        part: &CacheMap,
        memory: &GuestMemory,
        looked_at: usize,
    ) -> (Map, bool, Vec<String>) {
        let matched = guest_disks::matched(part.devices(), self.disks);
        let each = matched.iter().zip(part.devices()).skip(looked_at);
        let notes = each.filter_map(|(disk, device)| {
            let why = disk.as_ref().err()?;
            Some(format!("the guest's disk {} is not read: {why}", device.name))
        });
        let numbers: Vec<Option<u16>> =
            matched.iter().map(|disk| u16::try_from(*disk.as_ref().ok()?).ok()).collect();
        let map = stretches(part, &numbers, memory, self.blocks.clone());
        (map, names_pages(part, &numbers), notes.collect())
    }
}

/// Whether a helper runs in the guest, and can't answer: its operator wants to know why.
fn is_of_a_helper(error: &GuestError) -> bool {
    matches!(error, GuestError::Answer(Fault::Refused { .. } | Fault::OtherVersion { .. }))
}

/// A note for the operator about an incomplete map.
fn unfinished(summary: &Summary, cpu_percent: u16) -> Option<String> {
    let Summary { pages, cached_pages, elapsed_ms, cpu_ms, .. } = *summary;
    let what = match summary.end {
        End::Complete => return None,
        End::Time => "its time was up",
        End::Memory => "it may use no more memory",
        End::Runs => "it has reported as many runs of pages as are accepted",
    };
    let mut note = format!("the guest's helper reported only a part (see --helper-budget): {what}");
    let unseen = summary.left_out.iter().find(|left| left.reason == Reason::Unseen);
    if let Some(unseen) = unseen {
        let mib = |pages: u64| pages / ((1 << 20) / cachemap::PAGE_BYTES);
        let all = cached_pages.saturating_add(unseen.count).max(pages);
        note += &format!(" when it had reported {} of {} MiB", mib(pages), mib(all));
    }
    // Less than half of what it may use.
    let most_ms = elapsed_ms.saturating_mul(cpu_percent.into()) / 100;
    if summary.end == End::Time && cpu_ms < most_ms / 2 {
        note += ", because the guest's CPUs or disks were busy";
    }
    Some(note)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use cachemap::LeftOut;

    use super::*;

    #[test]
    fn a_helper_that_cannot_answer_is_told_from_none() {
        let refused = GuestError::Answer(Fault::Refused { text: "openat2".to_owned() });
        let other = GuestError::Answer(Fault::OtherVersion { theirs: 9 });
        assert!(is_of_a_helper(&refused) && is_of_a_helper(&other));
        // Of a guest without a helper nobody needs the note that it has none.
        let garbage = GuestError::Answer(Fault::NoGreeting { bytes: 7 });
        assert!(!is_of_a_helper(&GuestError::NobodyThere) && !is_of_a_helper(&garbage));
    }

    #[test]
    fn a_part_is_said_to_be_one_of_all() {
        let left = |count| vec![LeftOut { reason: Reason::Unseen, count }];
        let note = |end, cpu_ms, left_out| {
            let numbers = Summary { elapsed_ms: 10_000, pages: 36_096, ..Summary::default() };
            let cached_pages = 37_000;
            unfinished(&Summary { end, cpu_ms, cached_pages, left_out, ..numbers }, 50)
        };
        assert_eq!(note(End::Complete, 0, Vec::new()), None);
        let part = "the guest's helper reported only a part (see --helper-budget): ";
        let said = |end, cpu_ms, left_out| {
            note(end, cpu_ms, left_out).unwrap().strip_prefix(part).unwrap().to_owned()
        };
        assert_eq!(
            said(End::Time, 100, left(36_728)),
            "its time was up when it had reported 141 of 288 MiB, because the guest's CPUs or \
             disks were busy"
        );
        assert_eq!(
            said(End::Time, 4000, left(36_728)),
            "its time was up when it had reported 141 of 288 MiB"
        );
        // Of an earlier helper.
        assert_eq!(said(End::Time, 4000, Vec::new()), "its time was up");
        assert_eq!(said(End::Memory, 0, Vec::new()), "it may use no more memory");
    }

    #[test]
    fn an_owner_that_hangs_up_early_waits_for_no_answer() {
        let (ours, mut helper) = UnixStream::pair().unwrap();
        let line = Line::default();
        line.connect(&ours).unwrap();
        line.hang_up();
        assert_eq!(helper.read(&mut [0]).unwrap(), 0, "it is shut down");
        line.close();
        assert!(line.connect(&ours).is_err());
        let (ours, _helper) = UnixStream::pair().unwrap();
        let line = Line::default();
        line.hang_up();
        assert!(line.connect(&ours).is_err(), "and nothing is asked");
    }
}
