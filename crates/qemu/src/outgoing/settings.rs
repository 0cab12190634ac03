//! QEMU's migration capabilities and parameters: noted, set, put back.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::qmp::{Qmp, QmpError};

/// Parameters that `announce-self` takes as its arguments, by their names as
/// migration parameters.
const ANNOUNCE: [&str; 4] =
    ["announce-initial", "announce-max", "announce-rounds", "announce-step"];

/// How QEMU was set, and what of it was changed.
#[derive(Debug)]
pub(crate) struct Settings {
    capabilities: BTreeMap<String, bool>,
    parameters: Map<String, Value>,
    capabilities_changed: Vec<String>,
    parameters_changed: Vec<String>,
}

impl Settings {
    pub(crate) fn note(qmp: &Qmp) -> Result<Self, QmpError> {
        let answer = qmp.execute("query-migrate-capabilities", json!({}))?;
        let capability =
            |one: &Value| Some((one["capability"].as_str()?.to_owned(), one["state"].as_bool()?));
        let capabilities = crate::qmp::list(&answer, "query-migrate-capabilities", capability)?;
        let answer = qmp.execute("query-migrate-parameters", json!({}))?;
        let parameters = answer.as_object().cloned().unwrap_or_default();
        Ok(Self {
            capabilities: capabilities.into_iter().collect(),
            parameters,
            capabilities_changed: Vec::new(),
            parameters_changed: Vec::new(),
        })
    }

    /// Whether this QEMU knows the capability.
    pub(crate) fn has_capability(&self, name: &str) -> bool {
        self.capabilities.contains_key(name)
    }

    /// Whether this QEMU knows the parameter.
    pub(crate) fn has_parameter(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    /// Sets every capability that this QEMU has and that is not as wanted.
    pub(crate) fn set_capabilities(
        &mut self,
        qmp: &Qmp,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(), QmpError> {
        let differ: Vec<String> = self
            .capabilities
            .iter()
            .filter(|(name, state)| wanted(name) != **state)
            .map(|(name, _)| name.clone())
            .collect();
        let states = differ.iter().map(|name| (name.as_str(), wanted(name)));
        set_capabilities(qmp, states)?;
        self.capabilities_changed.extend(differ);
        Ok(())
    }

    /// Sets those parameters that this QEMU has.
    pub(crate) fn set_parameters(
        &mut self,
        qmp: &Qmp,
        wanted: &[(&str, Value)],
    ) -> Result<(), QmpError> {
        let differ: Map<String, Value> = wanted
            .iter()
            .filter(|(name, value)| self.parameters.get(*name).is_some_and(|old| old != value))
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        // Noted even if QEMU refuses one of them: it sets all or none, and to
        // put back what was not changed is harmless. What our policy sets on
        // the way is always put back.
        self.parameters_changed.extend(wanted.iter().map(|(name, _)| (*name).to_owned()));
        if differ.is_empty() {
            return Ok(());
        }
        qmp.execute("migrate-set-parameters", Value::Object(differ)).map(drop)
    }

    /// Puts back what was changed. Each by itself if QEMU refuses all at once,
    /// so that one odd value doesn't keep the others.
    pub(crate) fn restore(&mut self, qmp: &Qmp) {
        if qmp.is_closed() {
            return;
        }
        let parameters: Map<String, Value> = std::mem::take(&mut self.parameters_changed)
            .into_iter()
            .filter_map(|name| self.parameters.get(&name).map(|old| (name.clone(), old.clone())))
            .collect();
        if !parameters.is_empty()
            && qmp.execute("migrate-set-parameters", Value::Object(parameters.clone())).is_err()
        {
            for (name, value) in parameters {
                report(
                    qmp.execute("migrate-set-parameters", json!({ name.as_str(): value })),
                    &name,
                );
            }
        }
        let changed = std::mem::take(&mut self.capabilities_changed);
        let old = |name: &String| self.capabilities.get(name).copied().unwrap_or(false);
        if set_capabilities(qmp, changed.iter().map(|name| (name.as_str(), old(name)))).is_err() {
            for name in &changed {
                report(set_capabilities(qmp, [(name.as_str(), old(name))].into_iter()), name);
            }
        }
    }

    /// The arguments with which `announce-self` does what a migration would.
    pub(crate) fn announcement(&self) -> Value {
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

fn set_capabilities<'n>(
    qmp: &Qmp,
    states: impl Iterator<Item = (&'n str, bool)>,
) -> Result<(), QmpError> {
    let list: Vec<Value> =
        states.map(|(name, state)| json!({ "capability": name, "state": state })).collect();
    if list.is_empty() {
        return Ok(());
    }
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": list })).map(drop)
}

fn report<T>(outcome: Result<T, QmpError>, name: &str) {
    if let Err(error) = outcome {
        tracing::warn!(name, %error, "a migration setting of QEMU can't be put back");
    }
}
