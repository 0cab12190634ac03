//! A VM's taps, which its next QEMU gets when no other QEMU of the VM lives.
//!
//! How that is to be done is kept in the VM's directory until it is done: an agent that was killed
//! continues. It need not be on disk: a host that crashes has neither QEMU any more.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use host::taps::Joining;
use qemu::machine::{FormerTaps, JoiningTaps, Machine, Waiting};
use qemu::process::Until;
use qemu::qmp::RunState;

use super::Registry;
use crate::vms::vm::Vm;

/// Its name in the VM's directory.
const FILE: &str = "taps";
/// Its name while it is written.
const NEW: &str = "taps.new";

impl Registry {
    /// Ends every other QEMU of a VM than this one, which then gets their taps. May be called
    /// again. See [`Registry::be_alone`].
    ///
    /// The VM stands still meanwhile, and a QEMU with much memory takes long to exit. So without
    /// taps that is not waited for: one that does nothing any more writes to no RAM, and has
    /// released the images of disks.
    pub(super) fn end_former(&self, name: &str, one: &Machine) -> Result<(), String> {
        let dir = self.state().vm(name);
        let taps = JoiningTaps::of(one).map_err(|error| error.to_string())?;
        let noted = if taps.is_empty() { None } else { read(&dir)? };
        if noted.is_none() && taps.have_joined().map_err(|error| error.to_string())? {
            return self.end_besides(name, &one.record(), Until::Halted);
        }
        let former = self.taps_held(name).or_else(|| self.taps_left(name, one));
        let former = former.unwrap_or_default();
        let joining = noted.map_or_else(|| note(&dir, &taps, &former), Ok);
        let kept = joining.and_then(|joining| former.keep(&joining).map(|()| joining));
        let alone = kept.and_then(|joining| {
            let waiting = self.end_with_taps(name, one, (&former, &joining))?;
            Ok((joining, waiting))
        });
        let (joining, waiting) = match alone {
            Ok(alone) => alone,
            Err(why) => {
                // Until the next attempt: they may vanish with their QEMU, and packets with them.
                self.hold_taps(name, former);
                return Err(why);
            }
        };
        drop(former);
        taps.join(&joining).map_err(|error| error.to_string())?;
        waiting.deliver();
        forget(&dir)
    }

    /// Ends every other QEMU of a VM so far that this one can have their taps, and takes the
    /// packets that wait for them.
    ///
    /// The one queue of a device has to be closed, which the kernel does when the process exits. Of
    /// a device that may have several, those that are still open can be taken from it.
    fn end_with_taps(
        &self,
        name: &str,
        one: &Machine,
        (former, joining): (&FormerTaps, &[Joining]),
    ) -> Result<Waiting, String> {
        let end = |until| self.end_besides(name, &one.record(), until);
        if !former.may_leave(joining) {
            end(Until::Exited)?;
            return Ok(former.waiting());
        }
        end(Until::Halted)?;
        let waiting = former.waiting();
        if let Err(why) = former.leave() {
            tracing::warn!(vm = name, why, "waiting until the former QEMU has exited");
            end(Until::Exited)?;
        }
        Ok(waiting)
    }

    /// Gives the taps of a VM that doesn't run to its QEMU, which has the VM. One that runs has
    /// them: it got them before. If somebody else continued it, that is no reason to end the former
    /// one.
    pub(super) fn take_taps(&self, name: &str, vm: &Vm) -> Result<(), String> {
        let machine = vm.machine().filter(|machine| machine.passes_taps());
        let Some(machine) = machine else { return Ok(()) };
        match machine.qmp.run_state() {
            Ok(RunState::Running) => Ok(()),
            // Also one that an error has stopped, at its former QEMU already.
            Ok(_) => self.be_alone(name, &machine).map_err(|error| error.to_string()),
            Err(_) if !machine.process.is_alive() => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The same, if that failed when it got the VM.
    pub(super) fn take_missing_taps(&self, name: &str, vm: &Arc<Vm>) -> Result<(), String> {
        let lacks_them = self.next(name).is_some_and(|next| Arc::ptr_eq(&next, vm));
        if !lacks_them {
            return Ok(());
        }
        self.take_taps(name, vm)?;
        if let Some(slot) = self.slots.lock().get_mut(name) {
            slot.next = None;
        }
        Ok(())
    }

    /// Leaves a VM's taps to its former QEMU, as they were before they were about to change hands.
    pub(super) fn leave_taps(&self, name: &str, former: &Machine) {
        let dir = self.state().vm(name);
        let left = match read(&dir) {
            Ok(None) => return,
            Ok(Some(joining)) => FormerTaps::left(former).release(&joining),
            Err(why) => Err(why),
        };
        // The VM goes on with them all the same.
        if let Err(why) = left.and_then(|()| forget(&dir)) {
            tracing::warn!(vm = name, why, "a tap of the VM may stay when the VM has ended");
        }
    }

    /// Holds the taps of a VM's former QEMU for its next one, if it is getting one.
    pub(super) fn hold_taps(&self, name: &str, taps: FormerTaps) {
        let mut slots = self.slots.lock();
        if let Some(next) = slots.get_mut(name).and_then(|slot| slot.next.as_mut()) {
            next.taps = Some(taps);
        }
    }

    /// The taps of a VM's former QEMU, if they were held for the next one.
    fn taps_held(&self, name: &str) -> Option<FormerTaps> {
        self.slots.lock().get_mut(name)?.next.as_mut()?.taps.take()
    }

    /// The same, if that QEMU lives.
    fn taps_left(&self, name: &str, one: &Machine) -> Option<FormerTaps> {
        let machine = self.vm(name)?.machine()?;
        let is_former = !machine.record().is_of(&one.record());
        is_former.then(|| FormerTaps::left(&machine))
    }
}

/// Notes how the next QEMU's open files join the former one's taps.
fn note(dir: &Path, taps: &JoiningTaps, former: &FormerTaps) -> Result<Vec<Joining>, String> {
    let mut joining = taps.joining().map_err(|error| error.to_string())?;
    former.note(&mut joining);
    write(dir, &joining)?;
    Ok(joining)
}

/// Removes what was kept of an earlier upgrade.
pub(super) fn forget(dir: &Path) -> Result<(), String> {
    match fs::remove_file(dir.join(FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(cannot(dir, &error)),
        _ => Ok(()),
    }
}

fn write(dir: &Path, joining: &[Joining]) -> Result<(), String> {
    let text = serde_json::to_vec(joining).map_err(|error| error.to_string())?;
    // A kill in between leaves no part of it.
    let written = fs::write(dir.join(NEW), text);
    let written = written.and_then(|()| fs::rename(dir.join(NEW), dir.join(FILE)));
    written.map_err(|error| cannot(dir, &error))
}

fn read(dir: &Path) -> Result<Option<Vec<Joining>>, String> {
    let text = match fs::read(dir.join(FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|error| cannot(dir, &error))?,
    };
    let read = serde_json::from_slice(&text).map_err(io::Error::other);
    read.map(Some).map_err(|error| cannot(dir, &error))
}

fn cannot(dir: &Path, error: &io::Error) -> String {
    format!("{}: {error}", dir.join(FILE).display())
}

#[cfg(test)]
mod tests {
    use host::taps::Kind;

    use super::*;

    #[test]
    fn what_is_kept_is_read_again_until_it_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()), Ok(None));
        forget(dir.path()).unwrap();
        let joining = Joining {
            name: "tap0".to_owned(),
            kind: Kind { virtio_header: true, multi_queue: true },
            header_bytes: Some(12),
            enabled: vec![true, false],
            is_temporary: true,
        };
        write(dir.path(), std::slice::from_ref(&joining)).unwrap();
        assert_eq!(read(dir.path()), Ok(Some(vec![joining])));
        fs::write(dir.path().join(FILE), "[").unwrap();
        let damaged = read(dir.path()).unwrap_err();
        assert!(damaged.contains("/taps: "), "{damaged}");
        forget(dir.path()).unwrap();
        assert_eq!(read(dir.path()), Ok(None));
    }
}
