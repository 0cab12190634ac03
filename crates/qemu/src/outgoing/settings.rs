//! QEMU's migration capabilities and parameters: queried, changed, restored.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::before::{Before, set_capabilities};
use crate::machine::Machine;
use crate::qmp::{Qmp, QmpError};

/// Parameters that `announce-self` takes as its arguments, by their names as
/// migration parameters.
const ANNOUNCE: [&str; 4] =
    ["announce-initial", "announce-max", "announce-rounds", "announce-step"];

/// QEMU's settings when they were queried, and what was changed since.
#[derive(Debug)]
pub(crate) struct Settings {
    capabilities: BTreeMap<String, bool>,
    parameters: Map<String, Value>,
    /// What to restore, and the directory where that is saved.
    changed: Option<(Before, PathBuf)>,
}

impl Settings {
    pub(crate) fn of(qmp: &Qmp) -> Result<Self, QmpError> {
        let answer = qmp.execute("query-migrate-capabilities", json!({}))?;
        let capability =
            |one: &Value| Some((one["capability"].as_str()?.to_owned(), one["state"].as_bool()?));
        let capabilities = crate::qmp::list(&answer, "query-migrate-capabilities", capability)?;
        let answer = qmp.execute("query-migrate-parameters", json!({}))?;
        let parameters = answer.as_object().cloned().unwrap_or_default();
        Ok(Self { capabilities: capabilities.into_iter().collect(), parameters, changed: None })
    }

    /// Whether this QEMU knows the capability.
    pub(crate) fn has_capability(&self, name: &str) -> bool {
        self.capabilities.contains_key(name)
    }

    /// Whether this QEMU knows the parameter.
    pub(crate) fn has_parameter(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    /// Sets every capability of this QEMU as wanted, and those of the wanted
    /// parameters that it has. The old values are on disk before the first one
    /// changes, for an agent that finds the VM after this one has crashed.
    pub(crate) fn change(
        &mut self,
        machine: &Machine,
        capability: impl Fn(&str) -> bool,
        parameters: &[(&str, Value)],
    ) -> Result<(), QmpError> {
        let differ: BTreeMap<String, bool> = self
            .capabilities
            .iter()
            .filter(|(name, state)| capability(name) != **state)
            .map(|(name, state)| (name.clone(), *state))
            .collect();
        // Also those that are as wanted already: the agent changes some of them
        // during the migration.
        let had = |name: &str| Some((name.to_owned(), self.parameters.get(name)?.clone()));
        let old: Map<String, Value> = parameters.iter().filter_map(|(name, _)| had(name)).collect();
        let before = Before { capabilities: differ, parameters: old };
        before.write(&machine.dir)?;
        let (before, _) = self.changed.insert((before, machine.dir.clone()));

        set_capabilities(
            &machine.qmp,
            before.capabilities.iter().map(|(name, state)| (name.as_str(), !state)),
        )?;
        let wanted: Map<String, Value> = parameters
            .iter()
            .filter(|(name, value)| before.parameters.get(*name).is_some_and(|old| old != value))
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        if wanted.is_empty() {
            return Ok(());
        }
        machine.qmp.execute("migrate-set-parameters", Value::Object(wanted)).map(drop)
    }

    /// Restores what was changed.
    pub(crate) fn restore(&mut self, qmp: &Qmp) {
        let Some((before, dir)) = self.changed.take() else { return };
        if let Err(error) = before.put_back(qmp, &dir) {
            // A QEMU that has exited, as after a move, needs nothing restored. For
            // another one the saved file remains.
            tracing::debug!(%error, "cannot restore QEMU's migration settings");
        }
    }

    /// Announces the VM to the network's switches as often as its owner has set, which may be not
    /// at all.
    pub(crate) fn announce(&self, qmp: &Qmp) {
        let arguments = self.announcement();
        let silent = arguments["rounds"] == 0;
        if !silent && let Err(error) = qmp.execute("announce-self", arguments) {
            tracing::warn!(%error, "the VM can't announce itself to its network");
        }
    }

    /// The arguments with which `announce-self` does what a migration would.
    fn announcement(&self) -> Value {
        let arguments: Map<String, Value> = ANNOUNCE
            .iter()
            .filter_map(|name| {
                let value = self.parameters.get(*name)?.clone();
                Some((name.trim_start_matches("announce-").to_owned(), value))
            })
            .collect();
        Value::Object(arguments)
    }
}
