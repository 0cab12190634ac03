//! Whether a VM is in a state in which it can be moved.

use crate::qmp::{Qmp, QmpError, RunState};

/// Whether the VM's owner has its vCPUs running.
///
/// # Errors
/// If QEMU doesn't answer, or the VM is in a state in which it can't be moved.
pub fn runs(qmp: &Qmp) -> Result<bool, QmpError> {
    may_move(&qmp.run_state()?).map_err(QmpError::Migration)
}

/// Whether a VM in that state runs, or why it can't be moved.
fn may_move(state: &RunState) -> Result<bool, String> {
    match state {
        RunState::Running | RunState::Suspended => Ok(true),
        RunState::Paused | RunState::Prelaunch => Ok(false),
        // QEMU leaves it so only by `cont`, and so does a move of a paused VM that is undone.
        RunState::PostMigrate => Err(format!(
            "an earlier migration of the VM ended after QEMU had released the VM ({state}). If it \
             runs nowhere else, `cont` it in QEMU's monitor, and `stop` it again if it is to stay \
             paused"
        )),
        state => Err(format!("the VM is {state}; only a running or paused one can be moved")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_can_not_be_moved_is_told_what_to_do() {
        use RunState::{InMigrate, IoError, Paused, PostMigrate, Prelaunch, Running, Suspended};
        for (state, runs) in
            [(Running, true), (Suspended, true), (Paused, false), (Prelaunch, false)]
        {
            assert_eq!(may_move(&state), Ok(runs), "{state}");
        }
        for (state, says) in [
            (PostMigrate, "(postmigrate). If it runs nowhere else, `cont` it"),
            (IoError, "the VM is io-error; only a running or paused one"),
            (InMigrate, "the VM is inmigrate; only a running or paused one"),
        ] {
            let why = may_move(&state).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }
}
