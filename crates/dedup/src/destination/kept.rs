//! VMs that run on this host and provide content to VMs that arrive, until their processes end.

use std::sync::Arc;

use content::{Domain, EarlierNames, GivingWay, Key, Member, Name, Sample, Scanned, Scanner};
use qemu::machine::Machine;
use qemu::process::{Process, ProcessError};
use qemu::ram_blocks::RamBlocks;

use super::blocks::Blocks;
use super::exchange::Kept;
use super::resolve::Resolving;
use super::sharing::Sharing;

/// Why a VM's content can't be shared.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The process has ended, or may not be inspected.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// None of its memory can be read.
    #[error("its RAM can't be read: {0}")]
    Unreadable(String),
    /// The index is full.
    #[error("more VMs hold content here than the index can number")]
    TooMany,
}

fn unreadable(notes: &[String]) -> WatchError {
    if notes.is_empty() {
        let least = RamBlocks::BYTES_MIN >> 20;
        return WatchError::Unreadable(format!("no block of it has {least} MiB or more"));
    }
    WatchError::Unreadable(notes.join("; "))
}

impl Sharing {
    /// Starts a thread that scans the VMs of this host with at most this share of one CPU, and
    /// publishes their content to the rack's directory.
    pub fn scan(&self, share: f64) -> std::io::Result<()> {
        let rack = self.rack().cloned();
        let tell = move |names: &[Name]| {
            if let Some(rack) = &rack {
                rack.holds(names.to_vec());
            }
        };
        *self.scanner.lock() = Some(Scanner::start(&self.exchange.index, share, tell)?);
        Ok(())
    }

    /// Makes the thread of [`Sharing::scan`] give way while a VM arrives or leaves. None if there
    /// is no such thread.
    pub fn give_way(&self) -> Option<GivingWay> {
        self.scanner.lock().as_ref().map(Scanner::give_way)
    }

    /// What the system refused to the thread of [`Sharing::scan`].
    #[must_use]
    pub fn scan_refused(&self) -> Option<String> {
        self.scanner.lock().as_ref()?.refused()
    }

    /// Shares the content of a VM that runs here within its domain, until its process ends. A
    /// repeated call changes nothing; one with another domain takes the VM out of the first.
    ///
    /// # Errors
    /// If its memory can't be read.
    pub fn watch(&self, machine: &Machine, domain: &Domain) -> Result<(), WatchError> {
        self.watch_ram(&machine.process, domain, || RamBlocks::of(machine))
    }

    /// As [`Sharing::watch`], for a VM that this agent does not control: the caller knows its
    /// `ram`.
    ///
    /// # Errors
    /// If its memory can't be read.
    pub fn watch_ram(
        &self,
        process: &Process,
        domain: &Domain,
        ram: impl FnOnce() -> RamBlocks,
    ) -> Result<(), WatchError> {
        let (pid, key) = (process.pid(), self.key(domain));
        if self.exchange.kept.lock().iter().any(|kept| kept.is_of(pid) && kept.key == key) {
            return Ok(());
        }
        let (process, ram) = (Process::find(process.id())?, ram());
        let mut blocks = Blocks::default();
        for block in ram.reached {
            blocks.push(block.name, block.bytes, Some(block.mapping));
        }
        if blocks.pages() == 0 {
            return Err(unreadable(&ram.notes));
        }
        let blocks = Arc::new(blocks);
        let member =
            self.exchange.index.join(Arc::clone(&blocks) as _, key.clone(), blocks.pages());
        let member = Arc::new(member.ok_or(WatchError::TooMany)?);
        self.put(Kept { process, key, member, blocks });
        Ok(())
    }

    /// Shares the content of a VM that has arrived, whose pages have names already.
    pub fn keep(&self, resolving: &Resolving) {
        let recipient = resolving.recipient();
        // A VM that has ended, or whose memory can't be read, provides nothing.
        let Some(process) = recipient.blocks.process() else { return };
        let (key, member) = (recipient.key.clone(), Arc::clone(&recipient.member));
        self.put(Kept { process, key, member, blocks: Arc::clone(&recipient.blocks) });
    }

    /// Replaces the entry of the same process.
    fn put(&self, new: Kept) {
        let pid = new.process.pid();
        let mut kept = self.exchange.kept.lock();
        let before: Vec<Kept> = kept.extract_if(.., |kept| kept.is_of(pid)).collect();
        kept.push(new);
        // Members leave the index without the lock.
        drop(kept);
        drop(before);
    }

    /// Whether an arriving VM whose pages are named with `key` may find content here: of a VM that
    /// runs here, or arrives too.
    pub fn has_any(&self, key: &Key) -> bool {
        if self.exchange.receives(key) {
            return true;
        }
        let kept = self.exchange.kept.lock();
        let alike = kept.iter().filter(|kept| kept.key == *key);
        let members: Vec<Arc<Member>> = alike.map(|kept| Arc::clone(&kept.member)).collect();
        // Searching a large VM's notes takes long, so without the lock.
        drop(kept);
        members.iter().any(|member| member.has_names())
    }

    /// The names that the scanner has made of a VM's pages with this key, and the blocks by which
    /// it numbers them. None if the VM is not watched in the key's domain.
    pub(crate) fn earlier_names(
        &self,
        pid: u32,
        key: &Key,
    ) -> Option<(Arc<EarlierNames>, Arc<Blocks>)> {
        let kept = self.exchange.kept.lock();
        let kept = kept.iter().find(|kept| kept.is_of(pid) && kept.key == *key)?;
        Some((kept.member.earlier_names(), Arc::clone(&kept.blocks)))
    }

    /// What is known of a VM; none if it is not watched.
    #[must_use]
    pub fn known(&self, pid: u32) -> Option<Scanned> {
        Some(self.member(pid)?.scanned())
    }

    /// A sample of one in `one_in` of a VM's contents, as far as they are known.
    #[must_use]
    pub fn sample(&self, pid: u32, one_in: u32) -> Option<Sample> {
        Some(self.member(pid)?.sample(one_in))
    }

    fn member(&self, pid: u32) -> Option<Arc<Member>> {
        let kept = self.exchange.kept.lock();
        kept.iter().find(|kept| kept.is_of(pid)).map(|kept| Arc::clone(&kept.member))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use content::Index;
    use ram::Mapping;

    use super::*;

    fn sharing() -> Arc<Sharing> {
        Sharing::start(b"secret".to_vec(), None).unwrap()
    }

    fn kept(sharing: &Sharing, process: Process, domain: &str) -> Kept {
        let key = sharing.key(&Domain(domain.to_owned()));
        let mut blocks = Blocks::default();
        blocks.push("ram".to_owned(), 8 * 4096, Some(Arc::new(Mapping::own(8 * 4096))));
        let blocks = Arc::new(blocks);
        let member = sharing.exchange.index.join(Arc::clone(&blocks) as _, key.clone(), 8);
        Kept { process, key, member: Arc::new(member.unwrap()), blocks }
    }

    #[test]
    fn a_vm_is_kept_once_and_until_its_process_ends() {
        let sharing = sharing();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = || Process::now(child.id()).unwrap();
        sharing.put(kept(&sharing, process(), "red"));
        let name = sharing.key(&Domain("red".to_owned())).name(&[7; 4096]);
        sharing.member(child.id()).unwrap().note(&[(3, name)]);
        assert!(sharing.exchange.index.has(&name));
        let has_any = |domain: &str| sharing.has_any(&sharing.key(&Domain(domain.to_owned())));
        assert!(has_any("red") && !has_any("blue"));
        let pid = child.id();
        let has_earlier = |domain: &str| {
            sharing.earlier_names(pid, &sharing.key(&Domain(domain.to_owned()))).is_some()
        };
        assert!(has_earlier("red") && !has_earlier("blue"));
        assert_eq!(sharing.known(child.id()), Some(Scanned { rounds: 0, named: 1 }));
        assert_eq!(sharing.sample(child.id(), 1).unwrap().hints.len(), 1);
        // It is of another domain now, and nothing of the first one is left.
        sharing.put(kept(&sharing, process(), "blue"));
        assert!(!sharing.exchange.index.has(&name));
        assert_eq!(sharing.known(child.id()), Some(Scanned::default()));
        assert!(has_earlier("blue") && !has_earlier("red"));
        sharing.exchange.forget_ended();
        assert!(sharing.known(child.id()).is_some());
        let process = process();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive());
        sharing.exchange.forget_ended();
        assert_eq!(sharing.known(child.id()), None);
        assert!(!has_earlier("blue"));
    }

    #[test]
    fn a_vm_that_holds_nothing_for_others_says_why() {
        let small = unreadable(&[]).to_string();
        assert_eq!(small, "its RAM can't be read: no block of it has 24 MiB or more");
        let denied = unreadable(&["not allowed".to_owned(), "nor this".to_owned()]).to_string();
        assert_eq!(denied, "its RAM can't be read: not allowed; nor this");
    }

    #[test]
    fn a_scanner_ends_with_its_sharing() {
        let sharing = sharing();
        sharing.scan(0.05).unwrap();
        assert_eq!(sharing.known(1), None);
        let index: Arc<Index> = Arc::clone(&sharing.exchange.index);
        drop(sharing);
        drop(index);
    }
}
