//! What the destination has to know of the VM and its disks.
//!
//! This is found out before the destination's agent is connected, because that waits for its order
//! for a few seconds only: images may have to be read, which takes as long as their storage does.

use std::time::Duration;

use qemu::disks::{Challenge, Cleanup, challenges};
use qemu::lost_writes;
use qemu::outgoing;
use qemu::shape::{self, Drive, Shape};

use crate::error::MigrationError;
use crate::resources::Pools;
use crate::source::context::Context;
use crate::source::disks::{self, Chosen};

const NAMES_MAX: Duration = Duration::from_secs(10);

/// The VM as its destination has to have it.
pub(crate) struct Description {
    /// Without the disks that move.
    pub(super) shape: Shape,
    /// None: no disk moves.
    pub(super) chosen: Option<Chosen>,
    /// For the images that both hosts have to see.
    pub(super) files: Vec<Challenge>,
    /// Removes the challenge files next to the images when dropped.
    pub(super) cleanup: Cleanup,
}

/// The VM's drives when it was described to the destination.
pub(crate) struct Drives {
    /// Those that both hosts see.
    pub(crate) staying: Vec<Drive>,
    /// The nodes of all, as of shortly before.
    pub(crate) node_names: Vec<(String, Vec<String>)>,
}

impl Context<'_> {
    pub(super) fn describe(
        &mut self,
        pools: &Pools,
    ) -> Result<(Drives, Description), MigrationError> {
        let machine = &self.vm.machine;
        let qmp = &machine.qmp;
        if qmp.loses_writes()? {
            if !self.request.accept_lost_writes {
                return Err(MigrationError::LosesWrites);
            }
            self.report_builder.note(lost_writes::WHY);
        }
        outgoing::check_blockers(qmp)?;
        if self.request.incoming_qmp.is_none() {
            self.note_environment();
        }
        self.was_running = outgoing::runs(qmp)?;
        // Before the files, so that a change between the two is noticed later.
        let node_names = shape::node_names(qmp, NAMES_MAX)?;
        let shape = shape::of(qmp)?;
        let migration = self.report_builder.watch().progress().1.id;
        let (chosen, shape) =
            disks::choose(machine, shape, self.request, &migration, pools, &self.report_builder)?;
        let staying = staying(&shape.drives, chosen.as_ref());
        let (files, cleanup) = if self.request.shared_disks {
            Default::default()
        } else {
            let goes_on = || self.check_wanted().map_err(|error| error.to_string());
            challenges(&shape, &migration, &goes_on)
        };
        // If it is not, images have no proof that should have one.
        self.check_wanted()?;
        let drives = Drives { staying, node_names };
        Ok((drives, Description { shape, chosen, files, cleanup }))
    }

    /// Before the destination starts its QEMU, which may fail for want of it.
    fn note_environment(&self) {
        let names = self.vm.machine.missing_environment();
        if !names.is_empty() {
            self.report_builder.note(format!(
                "the VM's QEMU was started with {}, and agents start QEMU with their own \
                 environment: if it needs that, set it for the agents",
                names.join(", ")
            ));
        }
    }
}

/// The drives whose disks don't move with the VM. QEMU changes no file under a mirror.
fn staying(drives: &[Drive], chosen: Option<&Chosen>) -> Vec<Drive> {
    let moving = chosen.map_or(&[][..], |chosen| &chosen.disks);
    let stays = |drive: &&Drive| !moving.iter().any(|disk| disk.name == drive.name);
    drives.iter().filter(stays).cloned().collect()
}
