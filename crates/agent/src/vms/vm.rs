//! One VM of this host: its QEMU and its record on disk.

mod alive;
mod shown;
mod shut_down;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use api::VmStatus;
use parking_lot::Mutex;
use qemu::machine::Machine;

use crate::vms::record::{self, Record, Standing};

use alive::Qemu;
pub(crate) use alive::with_log;
use shut_down::{ShutDown, stops};

/// Where a VM is, as it is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Here,
    Arriving,
    /// Its switchover is unfinished, and its migration has ended.
    Unsettled,
}

/// One VM.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) name: String,
    pub(crate) dir: PathBuf,
    /// Its sharing domain; empty is the cluster's default domain.
    pub(crate) share_domain: String,
    /// As its QEMU last reported; 0 until it has answered.
    ram_bytes: AtomicU64,
    /// Set when it arrives, once its QEMU has answered.
    pages_bytes: OnceLock<u64>,
    known: Mutex<Known>,
    /// Held while the agent reconnects: QEMU serves one client at a time.
    meeting: Mutex<()>,
}

/// The mutable state of a VM.
#[derive(Debug)]
struct Known {
    qemu: Qemu,
    /// QEMU's last answer, for when it doesn't answer.
    status: VmStatus,
    /// When QEMU was queried for that answer.
    asked: Option<Instant>,
    /// What stopped it, until it runs again.
    stopped_by: Option<String>,
    /// How its guest ended, if QEMU has reported that and not ended yet.
    shut_down: Option<ShutDown>,
    /// Why it can't move, though it runs.
    stuck_by: Option<String>,
    /// Why its RAM may not be as its guest left it.
    ran_early: Option<String>,
    /// What is undecided about its last switchover.
    doubt: Option<String>,
    /// Why its record can't be read or used, and what to do.
    unreadable: Option<String>,
    /// Why its record does not yet say that it is here.
    unnoted: Option<String>,
    /// A QEMU that an upgrade left, and what to do.
    left_over: Option<String>,
}

impl Known {
    fn new(qemu: Qemu, status: VmStatus) -> Self {
        Self {
            qemu,
            status,
            asked: None,
            stopped_by: None,
            shut_down: None,
            stuck_by: None,
            ran_early: None,
            doubt: None,
            unreadable: None,
            unnoted: None,
            left_over: None,
        }
    }

    /// Takes note of QEMU's events about its guest's end.
    fn receive(&mut self) {
        let Qemu::Alive { machine, ends } = &mut self.qemu else { return };
        let stops_again = || (!machine.qmp.is_closed()).then(|| stops(&machine.qmp));
        self.shut_down = ends.receive(self.shut_down, stops_again);
    }

    /// Takes note of QEMU's answer to a query of that time.
    ///
    /// A thread that had to wait may come with an answer from before the guest ended, or before
    /// another thread's answer.
    fn answered(&mut self, asked: Instant, status: VmStatus) {
        if self.asked.is_some_and(|last| last > asked) {
            return;
        }
        (self.asked, self.status) = (Some(asked), status);
        if status == VmStatus::Running {
            self.stopped_by = None;
            self.shut_down = self.shut_down.filter(|it| it.at > asked);
        }
    }

    /// The worst of its problems, for the operator.
    fn problem(&self) -> Option<String> {
        let undecided = [&self.doubt, &self.unreadable, &self.unnoted];
        let others = [&self.ran_early, &self.stopped_by, &self.stuck_by];
        undecided.into_iter().chain(others).find_map(Clone::clone)
    }
}

impl Vm {
    /// A VM whose QEMU answers.
    pub(crate) fn new(
        name: &str,
        dir: PathBuf,
        machine: impl Into<Arc<Machine>>,
        ram_bytes: u64,
    ) -> Self {
        let qemu = Qemu::alive(machine);
        Self::of(name, dir, "", ram_bytes, Known::new(qemu, VmStatus::Paused))
    }

    fn of(name: &str, dir: PathBuf, share_domain: &str, ram_bytes: u64, known: Known) -> Self {
        Self {
            name: name.to_owned(),
            dir,
            share_domain: share_domain.to_owned(),
            ram_bytes: ram_bytes.into(),
            pages_bytes: OnceLock::new(),
            known: Mutex::new(known),
            meeting: Mutex::default(),
        }
    }

    /// This VM in another sharing domain.
    pub(crate) fn within(self, share_domain: &str) -> Self {
        Self { share_domain: share_domain.to_owned(), ..self }
    }

    /// A VM with a record whose QEMU can't be found or connected to.
    pub(crate) fn lost(name: &str, dir: PathBuf, record: Record, why: String) -> Self {
        let (pid, argv) = record
            .machine
            .as_ref()
            .map_or((0, Vec::new()), |machine| (machine.pid(), machine.argv().to_vec()));
        let attached = !record.home(&dir).join("qemu.log").exists();
        let qemu = Qemu::Dead { pid, version: record.qemu, argv, attached, why };
        let known = Known::new(qemu, VmStatus::Dead);
        Self::of(name, dir, &record.share_domain, record.ram_bytes, known)
    }

    /// A VM whose record can't be read, or doesn't say what to do with its QEMU.
    ///
    /// That QEMU may run, and is left alone. `record` is the record, if it could be read; `why`
    /// also says what to do.
    pub(crate) fn unreadable(
        name: &str,
        dir: PathBuf,
        record: Option<Record>,
        why: String,
    ) -> Self {
        let record = record.unwrap_or_else(|| {
            // Its domain is not known, so it must share with no other VM.
            let alone: String =
                format!("unreadable.{name}").chars().take(api::Sharing::DOMAIN_MAX).collect();
            Record::new(Standing::Here, None, 0, "", &alone)
        });
        let vm = Self::lost(name, dir, record, why.clone());
        vm.known.lock().unreadable = Some(why);
        vm
    }

    /// Writes its record.
    pub(crate) fn save(&self, standing: Standing) -> io::Result<()> {
        self.record(standing)?.write(&self.dir)?;
        let mut known = self.known.lock();
        (known.unreadable, known.unnoted) = (None, None);
        Ok(())
    }

    /// Writes the record of a QEMU that is to have the VM.
    pub(crate) fn save_next(&self) -> io::Result<()> {
        self.record(Standing::Arriving)?.write_next(&self.dir)
    }

    fn record(&self, standing: Standing) -> io::Result<Record> {
        let Some(machine) = self.machine() else {
            return Err(io::Error::other("its QEMU has exited"));
        };
        let (ram_bytes, domain) = (self.ram_bytes(), self.share_domain.as_str());
        Ok(Record::new(standing, Some(machine.record()), ram_bytes, &machine.version, domain))
    }

    /// Writes its record as a VM of this host.
    ///
    /// Until that succeeds, its problem says why not. A record that can't be read is kept next to
    /// the new one; without a QEMU there is no new one, and it stays for an agent that can read it.
    pub(crate) fn save_here(&self) -> io::Result<()> {
        let aside = match (self.unreadable_why(), self.machine()) {
            (Some(_), Some(_)) => record::set_aside(&self.dir),
            _ => Ok(()),
        };
        let saved = match aside.and_then(|()| self.save(Standing::Here)) {
            // It arrived, and its QEMU has ended since.
            Err(_) if self.machine().is_none() => self.save_dead(),
            saved => saved,
        };
        self.known.lock().unnoted = saved.as_ref().err().map(|error| {
            format!(
                "{} is here, and its record in {} can't be written ({error}): make room or fix the \
                 disk of the agent's state directory. The journal of its move replaces the record \
                 until then; the agent retries",
                self.name,
                self.dir.display()
            )
        });
        saved
    }

    fn save_dead(&self) -> io::Result<()> {
        let is_its = |record: &Record| {
            record.machine.as_ref().is_some_and(|machine| self.may_be_of(machine))
        };
        // Where it was to have the VM, its record is not in place yet.
        let next = Record::read_next(&self.dir).ok().filter(is_its);
        let mut record = match next {
            Some(record) => record,
            None => Record::read(&self.dir).map_err(io::Error::other)?,
        };
        record.standing = Standing::Here;
        record.write(&self.dir)
    }

    /// Notes why its QEMU does not have its taps, before which its record does not say that it is
    /// here.
    pub(crate) fn lacks_taps(&self, why: &str) {
        self.known.lock().unnoted = Some(format!(
            "{} is here, and its QEMU does not have its taps yet ({why}); the agent retries",
            self.name
        ));
    }

    /// Whether it is here but its record does not yet say so.
    pub(crate) fn is_unnoted(&self) -> bool {
        self.known.lock().unnoted.is_some()
    }

    /// Why its record can't be read or used, and what to do.
    pub(crate) fn unreadable_why(&self) -> Option<String> {
        self.known.lock().unreadable.clone()
    }

    pub(crate) fn ram_bytes(&self) -> u64 {
        self.ram_bytes.load(Relaxed)
    }

    /// The ordinary memory that it took when it arrived; none if that isn't known.
    pub(crate) fn pages_bytes(&self) -> Option<u64> {
        self.pages_bytes.get().copied()
    }

    /// Notes how much ordinary memory it takes as it arrives.
    pub(crate) fn takes_pages(&self, bytes: u64) {
        // A known value stays.
        let _ = self.pages_bytes.set(bytes);
    }

    /// Notes why it doesn't run, until it does.
    pub(crate) fn stopped_by(&self, why: String) {
        self.known.lock().stopped_by = Some(why);
    }

    /// Notes that something has ordered its QEMU to run it before its RAM was put back. Shown until
    /// it has another QEMU, or the agent is restarted; the migration's report has it as well.
    pub(crate) fn ran_early(&self, why: &str) {
        self.known.lock().ran_early = Some(why.to_owned());
    }

    /// Sets what the operator has to know of a QEMU that an upgrade left, if there is one.
    pub(crate) fn note_left_over(&self, left_over: Option<String>) {
        self.known.lock().left_over = left_over;
    }

    /// What the operator has to know of such a QEMU.
    pub(crate) fn left_over(&self) -> Option<String> {
        self.known.lock().left_over.clone()
    }

    /// Sets what the operator has to know of its last switchover, if anything.
    pub(crate) fn doubt(&self, doubt: Option<String>) {
        self.known.lock().doubt = doubt;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The journal of its arrival says that it is here, and its QEMU has ended.
    #[test]
    fn a_record_that_cannot_be_read_stays_where_there_is_no_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        let newer = r#"{"version":99,"standing":"resting"}"#;
        fs::write(&path, newer).unwrap();
        let why = "a newer droveway wrote it".to_owned();
        let vm = Vm::unreadable("web1", dir.path().to_owned(), None, why.clone());
        vm.save_here().unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), newer);
        assert!(vm.is_unnoted(), "so the journal stays too");
        assert_eq!(vm.unreadable_why(), Some(why));
        // As after a disk that could not be read for a while.
        Record::new(Standing::Arriving, None, 0, "", "").write(dir.path()).unwrap();
        vm.save_here().unwrap();
        assert_eq!(Record::read(dir.path()).unwrap().standing, Standing::Here);
    }
}
