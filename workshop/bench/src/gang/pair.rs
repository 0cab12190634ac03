//! A pair of VMs, of which one asks and the other answers: their rate undisturbed, and while they
//! move.

use std::thread;
use std::time::{Duration, Instant};

use super::figures::PairFigures;
use lab::error::{LabError, Result};
use lab::guest::Guest;

/// How long they are watched before the move.
const BEFORE: Duration = Duration::from_secs(3);

/// The VM that asks.
pub(super) struct Asking<'g> {
    guest: &'g Guest,
    before_per_s: f64,
}

impl<'g> Asking<'g> {
    /// Watches the VM that asks for a while, if there is one.
    pub(super) fn watch(guests: &'g [Guest]) -> Result<Option<Self>> {
        let Some(guest) = guests.iter().find(|guest| guest.spec.orders.asks > 0) else {
            return Ok(None);
        };
        // Wait until it has found the other VM.
        thread::sleep(BEFORE / 3);
        let from = Instant::now();
        thread::sleep(BEFORE);
        let before_per_s = guest.felt(from, Instant::now()).answers_per_s;
        if before_per_s > 0.0 {
            return Ok(Some(Self { guest, before_per_s }));
        }
        let (what, detail) = ("answers to a guest".to_owned(), String::new());
        Err(LabError::Silent { what, waited: BEFORE, detail })
    }

    /// The pair's figures between two instants.
    pub(super) fn judge(&self, from: Instant, to: Instant) -> Result<PairFigures> {
        let meanwhile_per_s = self.guest.felt(from, to).answers_per_s;
        let kept = meanwhile_per_s / self.before_per_s;
        let status = self.guest.ask("status")?;
        let wrong = status.split(' ').find_map(|word| word.strip_prefix("wrong_answers="));
        let unclear = || LabError::Guest { command: "status".to_owned(), answer: status.clone() };
        Ok(PairFigures {
            before_per_s: self.before_per_s,
            meanwhile_per_s,
            lost_s: (1.0 - kept) * to.saturating_duration_since(from).as_secs_f64(),
            wrong: wrong.and_then(|wrong| wrong.parse().ok()).ok_or_else(unclear)?,
        })
    }
}
