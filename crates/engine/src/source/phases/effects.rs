//! Carries out the switchover's decisions at the source: sends messages to the
//! destination, waits for QEMU, lets the VM go on, or ends it.

use std::marker::PhantomData;

use api::Phase;
use switchover::source::{Effects, Event as Step, Outcome as Fate};
use switchover::{Doubt, Envelope};
use wire::ToDestination;

use super::journaled::Reversible;

/// A step of the switchover in some phase.
pub(crate) struct Switching<'s, 'm, P> {
    phase: &'s mut P,
    fate: &'s mut Option<Fate>,
    migration: PhantomData<&'m ()>,
}

impl<'s, P> Switching<'s, '_, P> {
    pub(crate) fn new(phase: &'s mut P, fate: &'s mut Option<Fate>) -> Self {
        Self { phase, fate, migration: PhantomData }
    }
}

impl<'m, P: Reversible<'m>> Effects for Switching<'_, 'm, P> {
    fn send(&mut self, said: &Envelope<switchover::ToDestination>) {
        let connected = self.phase.connected_mut();
        let context = &mut connected.context;
        if matches!(said.message, switchover::ToDestination::Go { .. }) && !context.committed {
            context.committed = true;
            context.report_builder.enter(Phase::Committed);
        }
        // A lost message is sent again, or queried.
        if let Err(error) = connected.send(&ToDestination::Switchover { said: said.clone() }) {
            tracing::info!(%error, "cannot send a switchover message");
        }
    }

    fn await_completed(&mut self) -> Step {
        self.phase.await_completed()
    }

    fn go_on(&mut self, run: bool) -> Step {
        // The owner may have paused it meanwhile.
        let run = run && self.phase.connected().context.was_running;
        let backed_out = self.phase.back_out(run);
        match backed_out {
            Ok(()) => Step::WentOn,
            Err(_) if !self.phase.connected().context.vm.machine.process.is_alive() => {
                Step::QemuExited
            }
            Err(error) => Step::CannotGoOn { reason: error.to_string().into() },
        }
    }

    fn quit(&mut self) -> bool {
        self.phase.finish();
        let context = &self.phase.connected().context;
        match context.vm.machine.quit() {
            Ok(()) => true,
            Err(error) => {
                context.report_builder.note(format!("the source's QEMU does not end: {error}"));
                false
            }
        }
    }

    fn in_doubt(&mut self, doubt: &Doubt) {
        let context = &self.phase.connected().context;
        tracing::error!(advice = context.advice(doubt), "in doubt");
    }

    fn done(&mut self, fate: Fate) {
        *self.fate = Some(fate);
    }
}
