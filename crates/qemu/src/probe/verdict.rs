//! Whether a program can run a VM.

use super::Capabilities;

/// A program, and what a VM requires of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict<'v> {
    /// The program.
    pub program: &'v str,
    /// Its capabilities.
    pub known: &'v Capabilities,
    /// The VM's machine type, with its version.
    pub machine: &'v str,
    /// Its CPU model, if its command line names one.
    pub cpu: Option<&'v str>,
}

/// Why a program can't run a VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// It doesn't know the machine type: it is older than the VM, or newer.
    #[error(
        "QEMU {version} there ({program}) doesn't know the machine type {machine}: install a QEMU \
         there that does{}, or have --set name another program",
        as_new_as(machine)
    )]
    Machine {
        /// Its version.
        version: String,
        /// The program.
        program: String,
        /// The VM's.
        machine: String,
    },
    /// It doesn't know the CPU model.
    #[error(
        "QEMU {version} there ({program}) doesn't know the CPU model {cpu}: install a QEMU there \
         that does, or have --set name another program"
    )]
    Cpu {
        /// Its version.
        version: String,
        /// The program.
        program: String,
        /// The VM's.
        cpu: String,
    },
}

impl Verdict<'_> {
    /// Checks that the program can run the VM.
    ///
    /// # Errors
    /// With the first reason why it can't.
    pub fn check(&self) -> Result<(), Unfit> {
        let (version, program) = (self.known.version_text(), self.program.to_owned());
        if !self.known.knows_machine(self.machine) {
            return Err(Unfit::Machine { version, program, machine: self.machine.to_owned() });
        }
        match self.cpu {
            // If it lists none, the answer was not understood.
            Some(cpu) if !self.known.cpus.is_empty() && self.known.cpu(cpu).is_none() => {
                Err(Unfit::Cpu { version, program, cpu: cpu.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Features of the CPU model that the host can't provide. A VM whose command line
    /// switches them off can still run there.
    #[must_use]
    pub fn unavailable(&self) -> &[String] {
        let model = self.cpu.and_then(|cpu| self.known.cpu(cpu));
        model.map_or(&[], |model| &model.unavailable)
    }
}

/// `pc-q35-10.0` came with QEMU 10.0.
fn as_new_as(machine: &str) -> String {
    let version = machine.rsplit('-').next().filter(|version| {
        version.contains('.') && version.chars().all(|c| c.is_ascii_digit() || c == '.')
    });
    version.map_or_else(String::new, |version| format!(" (QEMU {version} or newer)"))
}

#[cfg(test)]
mod tests {
    use super::super::answers::{tests::SAID, understood};
    use super::*;

    #[test]
    fn unknown_machine_types_and_cpu_models_are_named() {
        let known = understood(SAID).unwrap();
        let verdict = |machine, cpu| Verdict { program: "/q", known: &known, machine, cpu };
        assert_eq!(verdict("pc-q35-7.2", Some("Haswell")).check(), Ok(()));
        assert_eq!(verdict("pc-q35-7.2", None).check(), Ok(()));
        let machine = verdict("pc-q35-10.0", None).check().unwrap_err().to_string();
        assert!(machine.contains("QEMU 7.2.22 there (/q)"), "{machine}");
        assert!(machine.contains("machine type pc-q35-10.0") && machine.contains("10.0 or newer"));
        let cpu = verdict("q35", Some("SierraForest")).check().unwrap_err().to_string();
        assert!(cpu.contains("doesn't know the CPU model SierraForest"), "{cpu}");
        assert_eq!(verdict("q35", Some("Haswell")).unavailable(), ["pcid", "hle"]);
        assert!(verdict("q35", None).unavailable().is_empty());
        let odd = Unfit::Machine {
            version: "1".to_owned(),
            program: "q".to_owned(),
            machine: "microvm".to_owned(),
        };
        assert!(!odd.to_string().contains("or newer"));
    }

    #[test]
    fn without_a_list_of_models_none_is_unknown() {
        let mut known = understood(SAID).unwrap();
        known.cpus.clear();
        let verdict =
            Verdict { program: "q", known: &known, machine: "q35", cpu: Some("cortex-a72") };
        assert_eq!(verdict.check(), Ok(()));
    }
}
