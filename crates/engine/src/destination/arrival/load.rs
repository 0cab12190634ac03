//! Everything was delivered: QEMU loads the VM.

use std::thread;
use std::time::Duration;

use crossbeam_channel::{after, bounded, select};
use placer::Feeder;
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use wire::ToDestination;

use super::{Arrival, End, SILENCE, ended};
use crate::link::Heard;

impl Arrival<'_> {
    /// Has QEMU load the VM. Nothing but the source's end of the migration can
    /// be heard meanwhile: it ends a QEMU that hangs in its load, too.
    pub(super) fn load(
        &self,
        machine: &Machine,
        incoming: &Incoming,
        feeder: &Feeder,
        tail: &[u8],
    ) -> Result<(), End> {
        self.lanes.end();
        let (done, over) = bounded::<()>(0);
        let wait = self.shared.local.waits.load;
        thread::scope(|scope| {
            let watch = || {
                let late = after(SILENCE * wait);
                let heard = loop {
                    let heard = select! {
                        recv(self.hear) -> heard => heard,
                        recv(late) -> _ => break None,
                        recv(over) -> _ => return None,
                    };
                    match heard {
                        // Nobody is left here to whom they matter.
                        Ok(Heard::Message(ToDestination::Terms(_))) => {}
                        heard => break Some(heard),
                    }
                };
                feeder.stop();
                if let Err(error) = machine.quit() {
                    tracing::warn!(%error, "the QEMU that loads the VM can't be ended");
                }
                let gone = || End::Over("the source's connection has ended".to_owned());
                let slow = || End::failed("its QEMU here does not load it");
                Some(heard.map_or_else(slow, |heard| heard.map_or_else(|_| gone(), ended)))
            };
            let watching = thread::Builder::new().name("load-watch".to_owned());
            let watching = watching.spawn_scoped(scope, watch).map_err(End::failed)?;
            let loaded = feed_tail(incoming, feeder, tail, wait);
            drop(done);
            match watching.join() {
                Ok(None) => loaded,
                Ok(Some(end)) => Err(end),
                Err(fault) => std::panic::resume_unwind(fault),
            }
        })
    }
}

fn feed_tail(incoming: &Incoming, feeder: &Feeder, tail: &[u8], wait: Duration) -> Result<(), End> {
    feeder.tail(tail).map_err(|error| End::failed(incoming.explain(&error)))?;
    feeder.finish().map_err(|error| End::failed(incoming.explain(&error)))?;
    incoming.wait_loaded(wait).map_err(End::failed)
}
