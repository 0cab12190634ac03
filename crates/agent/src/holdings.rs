//! What VMs that run here hold: a thread finds out where the RAM of each is, and
//! has it looked at from then on.
//!
//! A thread of its own, because it asks QEMU, and those who say that a VM is here
//! have no time for that: the VM may have just arrived.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use api::KnownContent;
use crossbeam_channel::{Receiver, Sender, unbounded};
use dedup::destination::Sharing;
use engine::{Domain, Sample};

use crate::vm::Vm;

/// The content of this host's VMs, as far as it is known. Dropping it ends its
/// thread.
#[derive(Debug)]
pub(crate) struct Holdings {
    sharing: Arc<Sharing>,
    tell: Option<Sender<Arc<Vm>>>,
    thread: Option<JoinHandle<()>>,
}

impl Holdings {
    /// Looks at VMs, with at most this share of one CPU.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub(crate) fn start(sharing: Arc<Sharing>, cpu_share: f64) -> io::Result<Self> {
        sharing.scan(cpu_share)?;
        let (tell, told) = unbounded();
        let thread = thread::Builder::new().name("holdings".to_owned()).spawn({
            let sharing = Arc::clone(&sharing);
            move || watch_all(&sharing, &told)
        })?;
        Ok(Self { sharing, tell: Some(tell), thread: Some(thread) })
    }

    /// A VM is here. Said again it changes nothing.
    pub(crate) fn watch(&self, vm: &Arc<Vm>) {
        if let Some(tell) = &self.tell {
            // The thread lives as long as this.
            let _ = tell.send(Arc::clone(vm));
        }
    }

    /// What is known of a VM.
    pub(crate) fn known(&self, pid: u32) -> Option<KnownContent> {
        let known = self.sharing.known(pid)?;
        Some(KnownContent { rounds: known.rounds, named_bytes: known.bytes() })
    }

    /// One in `one_in` of a VM's contents.
    pub(crate) fn sample(&self, pid: u32, one_in: u32) -> Option<Sample> {
        self.sharing.sample(pid, one_in)
    }
}

impl Drop for Holdings {
    fn drop(&mut self) {
        self.tell = None;
        if let Some(thread) = self.thread.take() {
            // A panic in it was reported there.
            let _ = thread.join();
        }
    }
}

fn watch_all(sharing: &Sharing, told: &Receiver<Arc<Vm>>) {
    while let Ok(vm) = told.recv() {
        if let Some(refused) = sharing.scan_refused() {
            tracing::warn!("{refused}");
        }
        let Some(machine) = vm.machine() else { continue };
        match sharing.watch(&machine, &Domain(vm.share_domain.clone())) {
            Ok(()) => {}
            // It ended meanwhile.
            Err(_) if !machine.process.is_alive() => {}
            Err(error) => {
                tracing::warn!(vm = vm.name, %error, "what it holds can be shared with nobody");
            }
        }
    }
}
