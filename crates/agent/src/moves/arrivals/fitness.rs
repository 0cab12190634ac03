//! Whether this host can run a VM: the checks before its QEMU is started, and the
//! explanation if it does not start.
//!
//! QEMU itself refuses what it doesn't know, so the agent probes the program only after
//! that has happened. The result is cached: the next such VM is refused before anything is
//! started.

use std::path::{Path, PathBuf};

use facts::host::Kvm;
use qemu::command_line::{CommandLine, Tap, apply_overrides, overridden};
use qemu::machine::StartError;
use qemu::probe::{Capabilities, Probes, Verdict};
use qemu::programs::Programs;
use qemu::room::{HostMemory, Needs, NoRoom, host_memory};
use qemu::shape::{Shape, missing_features};
use wire::Prepare;
use wire::gang::VmNeeds;

use crate::denied::Denied;
use crate::examiner::sight;

/// RAM blocks of one VM; the check reads storage for each.
const MEMORY_MAX: usize = 1024;
/// Missing CPU features that are named in an error.
const NAMED_MAX: usize = 12;

/// The QEMU to start.
pub(super) struct QemuToStart {
    pub(super) argv: Vec<String>,
    pub(super) cwd: PathBuf,
    /// The file that is executed.
    pub(super) program: PathBuf,
    line: CommandLine,
}

impl QemuToStart {
    pub(super) fn of(order: &Prepare, programs: &Programs) -> Result<Self, Denied> {
        let argv = apply_overrides(&order.argv, &order.overrides)?;
        let line = CommandLine::parse(&argv)?;
        let cwd = PathBuf::from(overridden(&order.cwd, &order.overrides)?);
        if !cwd.is_absolute() {
            let cwd = cwd.display();
            return Err(Denied::Invalid(format!("the VM's directory `{cwd}` is not absolute")));
        }
        if let (Some(_), Some(option)) = (programs.user(), line.needs_root()) {
            return Err(Denied::Invalid(format!(
                "{option} takes root's rights, and this host runs QEMU as a user without them \
                 (qemu-user): leave it out, or move the VM to a host without qemu-user"
            )));
        }
        let program = programs.find(line.program(), &cwd);
        let program = program.map_err(|not_allowed| Denied::Invalid(not_allowed.to_string()))?;
        Ok(Self { argv, cwd, program, line })
    }

    /// Makes the checks that take no time, except for [`has_room`], and returns the memory that
    /// the VM needs.
    pub(super) fn check(&self, shape: &Shape, probes: &Probes) -> Result<Needs, Denied> {
        let accelerator = self.line.accelerator();
        if accelerator == "kvm" {
            has_kvm(&sight::kvm(probes.programs().user()))?;
        }
        let known = probes.known(self.line.program(), &self.cwd, &accelerator);
        if let Some(known) = known {
            self.unfit(&known, &shape.machine).map_or(Ok(()), Err)?;
        }
        let count = shape.memory.len().max(shape.unplugged.len());
        if count > MEMORY_MAX {
            return Err(Denied::Invalid(format!("{count} RAM blocks are more than {MEMORY_MAX}")));
        }
        let host = host_memory();
        Ok(Needs::of(&self.line, &shape.memory, &shape.unplugged, &self.cwd, &host))
    }

    /// The taps of its network cards.
    pub(super) fn taps(&self) -> Vec<Tap> {
        self.line.taps()
    }

    /// Why it did not start.
    pub(super) fn explain(&self, error: StartError, machine: &str, probes: &Probes) -> Denied {
        if !matches!(error, StartError::Ended { .. }) {
            return error.into();
        }
        let known = probes.of(self.line.program(), &self.cwd, &self.line.accelerator());
        // If the program can't be probed, its own message explains more.
        let unfit = known.ok().and_then(|known| self.unfit(&known, machine));
        unfit.unwrap_or_else(|| error.into())
    }

    fn unfit(&self, known: &Capabilities, machine: &str) -> Option<Denied> {
        let cpu = self.line.cpu_model();
        let verdict = Verdict { program: self.line.program(), known, machine, cpu: cpu.as_deref() };
        verdict.check().err().map(|unfit| Denied::Conflict(unfit.to_string()))
    }
}

/// Checks that a host has the memory that a VM needs, in addition to the ordinary memory that is
/// `promised` to other VMs that are arriving.
pub(super) fn has_room(
    needs: &Needs,
    mut host: HostMemory,
    promised: u64,
    overcommit: bool,
) -> Result<(), Denied> {
    let free = host.available_bytes.map(|free| free.saturating_add(host.swap_free_bytes));
    host.available_bytes = free.map(|free| free.saturating_sub(promised));
    host.swap_free_bytes = 0;
    needs.fit(&host, overcommit).map_err(|no_room| {
        let mut text = no_room.to_string();
        if promised > 0 && matches!(no_room, NoRoom::Pages { .. }) {
            text += &format!(
                ". {} MiB of what is free there are promised to VMs that are arriving",
                promised >> 20
            );
        }
        Denied::Local(text)
    })
}

/// Checks that this host can run a VM, apart from its ordinary memory.
pub(crate) fn able(needs: &VmNeeds, probes: &Probes) -> Result<(), Denied> {
    if needs.accelerator == "kvm" {
        has_kvm(&sight::kvm(probes.programs().user()))?;
    }
    let known = probes.of(&needs.program, Path::new("/"), &needs.accelerator);
    let known = known.map_err(|error| Denied::Qemu(error.to_string()))?;
    // Empty if its QEMU did not report it.
    if !needs.machine.is_empty() {
        let VmNeeds { program, machine, cpu, .. } = needs;
        let verdict = Verdict { program, known: &known, machine, cpu: cpu.as_deref() };
        verdict.check().map_err(|unfit| Denied::Conflict(unfit.to_string()))?;
    }
    let needs = Needs { pages_bytes: 0, huge_bytes: needs.huge_bytes.iter().copied().collect() };
    needs.fit(&host_memory(), true).map_err(|no_room| Denied::Local(no_room.to_string()))
}

fn has_kvm(kvm: &Kvm) -> Result<(), Denied> {
    let why = match kvm {
        Kvm::Usable | Kvm::Unknown => return Ok(()),
        Kvm::Missing => "there is no /dev/kvm".to_owned(),
        Kvm::Denied(why) => format!("/dev/kvm can't be opened, {why}"),
    };
    Err(Denied::Local(format!(
        "the VM runs with KVM, and this host can't use KVM ({why}): `droveway doctor` there shows \
         what to do"
    )))
}

/// Checks that the guest keeps all CPU features that it has at the source.
pub(super) fn check_features(there: &Shape, here: &Shape) -> Result<(), Denied> {
    let mut missing = missing_features(there, here);
    if missing.is_empty() {
        return Ok(());
    }
    if missing.len() > NAMED_MAX {
        let more = missing.len() - NAMED_MAX;
        missing.truncate(NAMED_MAX);
        missing.push(format!("and {more} more"));
    }
    Err(Denied::Conflict(format!(
        "the guest's CPU has {}, which it would lack here: choose a host that has it, or restart \
         the VM with a -cpu that all hosts have",
        missing.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum of what is replaced must not be the product of its lengths.
    #[test]
    fn a_command_line_does_not_grow_without_bound() {
        let order = |argv: &str, new: &str| {
            let order = serde_json::json!({
                "migration": "1", "switchover": "7f3a", "agent_port": 1, "from": "a", "vm": "v",
                "argv": [argv], "cwd": "relative", "overrides": [["a", new]], "qemu": "",
                "shape": {}, "disks": [], "shared_disks": false, "moving": [], "allowed": {},
                "incoming_qmp": null,
            });
            serde_json::from_value::<Prepare>(order).unwrap()
        };
        let wanted =
            |argv: &str, new: &str| QemuToStart::of(&order(argv, new), &Programs::usual(None));
        let refused = |argv: &str, new: &str| wanted(argv, new).err().unwrap().to_string();
        // What is checked last here: so everything before was accepted.
        assert!(refused("/bin/a", "b").contains("is not absolute"));
        let text = refused(&"a".repeat(1000), &"b".repeat(60_000));
        assert!(text.contains("--set") && text.contains("131072 at most"), "{text}");
        let text = refused("a", &"b".repeat(100_000));
        assert!(text.contains("1 replacements with 100001 bytes"), "{text}");
    }

    #[test]
    fn features_that_are_missing_are_named_up_to_a_number() {
        let word = |bits: u32| {
            let word = serde_json::json!({
                "cpuid-input-eax": 1, "cpuid-register": "EDX", "features": bits,
            });
            let features = serde_json::from_value(serde_json::json!([word])).unwrap();
            Shape { cpu_features: features, ..Shape::default() }
        };
        assert_eq!(check_features(&word(7), &word(15)), Ok(()));
        let refused = |there, here| check_features(&word(there), &word(here)).unwrap_err();
        assert!(refused(7, 5).to_string().contains("CPU has vme, which it would lack here"));
        let many = refused(u32::MAX, 1).to_string();
        assert!(many.contains("vme, de, ") && many.contains(", and 18 more, which"), "{many}");
        let other = Shape { cpu: "other".to_owned(), ..word(0) };
        assert_eq!(check_features(&word(7), &other), Ok(()), "which is told as a difference");
    }

    #[test]
    fn what_arriving_vms_are_promised_is_not_free() {
        let host = HostMemory {
            available_bytes: Some(8 << 30),
            swap_free_bytes: 2 << 30,
            ..HostMemory::default()
        };
        let needs = Needs { pages_bytes: 8 << 30, ..Needs::default() };
        let check = |promised, overcommit| has_room(&needs, host.clone(), promised, overcommit);
        assert_eq!(check(0, false), Ok(()));
        assert_eq!(check(2 << 30, false), Ok(()), "swap counts");
        let refused = check(3 << 30, false).unwrap_err().to_string();
        assert!(refused.contains("this host has 7168 MiB to give"), "{refused}");
        assert!(refused.contains("3072 MiB of what is free there are promised"), "{refused}");
        assert_eq!(check(3 << 30, true), Ok(()));
        let huge = Needs { huge_bytes: [(2 << 20, 2 << 20)].into(), ..Needs::default() };
        let refused = has_room(&huge, host.clone(), 3 << 30, false).unwrap_err().to_string();
        assert!(!refused.contains("promised"), "huge pages are counted apart: {refused}");
    }

    #[test]
    fn without_kvm_it_is_said_what_to_do() {
        assert_eq!(has_kvm(&Kvm::Usable), Ok(()));
        let refused = has_kvm(&Kvm::Denied("no".to_owned())).unwrap_err().to_string();
        assert!(refused.contains("can't be opened, no") && refused.contains("droveway doctor"));
    }
}
