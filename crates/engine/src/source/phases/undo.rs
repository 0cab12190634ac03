//! Undoes a migration: before the commit, the VM always goes on here.

use api::Outcome;
use switchover::source::{Event as Step, Outcome as Fate};
use wire::ToDestination;

use super::connect::Connected;
use super::journaled::{Journaled, Reversible};
use super::{Ended, Undo};
use crate::error::MigrationError;
use crate::source::Settlement;
use crate::source::context::Context;

/// Without a journal the destination can't own the VM.
fn undone(error: &MigrationError) -> Ended {
    let outcome = match error {
        MigrationError::VmGone(_) => Outcome::Failed(error.to_string()),
        MigrationError::Cancelled => Outcome::Cancelled,
        _ => Outcome::Failed(stays(error)),
    };
    Ended { outcome, settlement: Settlement::Settled }
}

fn stays(error: &MigrationError) -> String {
    format!("{error}. The VM stays where it was")
}

impl Context<'_> {
    fn warn(&self, error: &MigrationError) {
        tracing::warn!(%error, "the migration ends; the VM stays here");
    }
}

impl Undo for Context<'_> {
    fn undo(self: Box<Self>, error: &MigrationError) -> Ended {
        self.warn(error);
        undone(error)
    }
}

impl Undo for Connected<'_> {
    fn undo(self: Box<Self>, error: &MigrationError) -> Ended {
        self.control.cut_if_stuck();
        self.context.warn(error);
        // This fails if the connection is what was lost.
        let _ = self.send(&ToDestination::Abort { reason: error.to_string() });
        undone(error)
    }
}

impl<'m, P: Reversible<'m>> Undo for Journaled<P> {
    fn undo(mut self: Box<Self>, error: &MigrationError) -> Ended {
        let outcome = self.take_back(error);
        self.end(outcome)
    }
}

impl<'m, P: Reversible<'m>> Journaled<P> {
    /// Ends the migration and lets the VM go on here, unless it was released.
    fn take_back(&mut self, error: &MigrationError) -> Outcome {
        let reason = error.to_string();
        self.phase.let_go();
        if matches!(error, MigrationError::InDoubt(_)) {
            self.phase.abandon();
            return Outcome::Failed(reason);
        }
        self.phase.connected().context.warn(error);
        if matches!(error, MigrationError::VmGone(_)) {
            self.step(Step::QemuExited);
            // Where QEMU had released the VM, the destination would have it unchecked.
            self.step(Step::GiveUp { reason: reason.as_str().into() });
            self.phase.account_disks();
            self.phase.abandon();
            return Outcome::Failed(reason);
        }
        // Does nothing if the switchover was already undone.
        self.step(Step::GiveUp { reason: reason.as_str().into() });
        let cancelled = matches!(error, MigrationError::Cancelled);
        let reason = if cancelled { reason } else { stays(error) };
        let context = &self.phase.connected().context;
        match (&self.fate, self.driver.machine().doubt()) {
            (Some(Fate::Lost { reason: how }), _) => {
                Outcome::Failed(format!("{reason}; but it ended: {how}"))
            }
            (_, Some(doubt)) => Outcome::Failed(format!("{reason}; but {}", context.advice(doubt))),
            _ if cancelled => Outcome::Cancelled,
            _ => Outcome::Failed(reason),
        }
    }
}
