//! The content of this host's VMs: a thread finds where the RAM of each VM is, and has it
//! scanned from then on.
//!
//! It is a separate thread because it queries QEMU, and callers of [`Holdings::watch`] can't
//! wait for that: the VM may have just arrived.

use std::io;
use std::sync::Arc;
use std::thread;

use api::KnownContent;
use crossbeam_channel::{Receiver, Sender, unbounded};
use data_threads::Joined;
use dedup::destination::Sharing;
use engine::{Domain, Sample};
use page::PAGE_BYTES;

use crate::vms::vm::Vm;

/// The known content of this host's VMs; dropping it ends its thread.
#[derive(Debug)]
pub(crate) struct Holdings {
    tell: Sender<Arc<Vm>>,
    _thread: Joined,
    sharing: Arc<Sharing>,
}

impl Holdings {
    /// Starts scanning, with at most this share of one CPU.
    pub(crate) fn start(sharing: Arc<Sharing>, cpu_share: f64) -> io::Result<Self> {
        sharing.scan(cpu_share)?;
        let (tell, told) = unbounded();
        let thread = thread::Builder::new().name("holdings".to_owned()).spawn({
            let sharing = Arc::clone(&sharing);
            move || watch_all(&sharing, &told)
        })?;
        Ok(Self { tell, _thread: thread.into(), sharing })
    }

    /// Has a VM of this host scanned; a repeated call changes nothing.
    pub(crate) fn watch(&self, vm: &Arc<Vm>) {
        // Sending can't fail: the thread lives as long as `self`.
        let _ = self.tell.send(Arc::clone(vm));
    }

    /// What is known of a VM.
    pub(crate) fn known(&self, pid: u32) -> Option<KnownContent> {
        let known = self.sharing.known(pid)?;
        let named_bytes = known.named * PAGE_BYTES as u64;
        Some(KnownContent { rounds: known.rounds, named_bytes })
    }

    /// A sample of a VM's content, one name in `one_in`.
    pub(crate) fn sample(&self, pid: u32, one_in: u32) -> Option<Sample> {
        self.sharing.sample(pid, one_in)
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
            // The VM ended meanwhile.
            Err(_) if !machine.process.is_alive() => {}
            Err(error) => {
                tracing::warn!(vm = vm.name, %error, "the content of this VM can't be shared");
            }
        }
    }
}
