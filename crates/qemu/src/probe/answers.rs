//! Parses a program's answers, line by line.

use facts::program::Capabilities;
use serde_json::Value;

use crate::command_line::LEGACY_ACK;

/// Most entries in a list; no QEMU has more.
const LISTED_MAX: usize = 10_000;

/// The capabilities in its output; `None` if an answer is missing.
pub(super) fn understood(said: &str) -> Option<Capabilities> {
    let mut version = None;
    let mut machines = None;
    let mut cpus = None;
    let mut legacy_ack = false;
    for line in said.lines() {
        let Ok(value) = serde_json::from_str::<Value>(line) else { continue };
        if let Some(greeting) = value.get("QMP") {
            version = greeted(greeting);
        }
        match value.get("id").and_then(Value::as_str) {
            Some("machines") => machines = Some(listed(&value["return"])?),
            // A QEMU for machines without CPU models answers with an error.
            Some("cpus") => cpus = Some(listed(&value["return"]).unwrap_or_default()),
            Some("migration") => legacy_ack = has_property(&value["return"], LEGACY_ACK),
            _ => {}
        }
    }
    Some(Capabilities { version: version?, machines: machines?, cpus: cpus?, legacy_ack })
}

/// Whether the properties of a type that QEMU lists have one of this name.
pub(crate) fn has_property(listed: &Value, name: &str) -> bool {
    let is_it = |property: &Value| property["name"] == name;
    listed.as_array().is_some_and(|listed| listed.iter().any(is_it))
}

fn greeted(greeting: &Value) -> Option<(u32, u32, u32)> {
    let version = &greeting["version"]["qemu"];
    let part = |name: &str| version[name].as_u64().and_then(|value| u32::try_from(value).ok());
    Some((part("major")?, part("minor")?, part("micro")?))
}

fn listed<T: serde::de::DeserializeOwned>(answer: &Value) -> Option<Vec<T>> {
    let items = answer.as_array()?.iter().take(LISTED_MAX);
    Some(items.filter_map(|item| T::deserialize(item).ok()).collect())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::probe) const SAID: &str = concat!(
        r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "x"}, "#,
        r#""capabilities": ["oob"]}}"#,
        "\n",
        r#"{"return": {}}"#,
        "\n",
        r#"{"return": [{"hotpluggable-cpus": true, "name": "pc-q35-7.2", "alias": "q35", "#,
        r#""cpu-max": 288, "deprecated": false}, {"name": "none", "cpu-max": 1}, "#,
        r#"{"name": "pc-i440fx-1.4", "cpu-max": 255, "deprecated": true}], "id": "machines"}"#,
        "\n",
        r#"{"return": [{"name": "Haswell", "typename": "Haswell-x86_64-cpu", "#,
        r#""unavailable-features": ["pcid", "hle"], "alias-of": "Haswell-v1", "static": false}, "#,
        r#"{"name": "max", "unavailable-features": []}, {"name": "qemu64"}], "id": "cpus"}"#,
        "\n",
        r#"{"return": {}}"#,
        "\n",
        r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "SHUTDOWN", "data": {}}"#,
        "\n",
    );

    #[test]
    fn answers_are_parsed() {
        let known = understood(SAID).unwrap();
        assert_eq!(known.version_text(), "7.2.22");
        assert!(known.knows_machine("q35") && known.knows_machine("pc-q35-7.2"));
        assert!(!known.knows_machine("pc-q35-10.0"));
        assert_eq!(known.machines.iter().filter(|machine| machine.deprecated).count(), 1);
        assert_eq!(known.cpu("Haswell").unwrap().unavailable, ["pcid", "hle"]);
        assert!(known.cpu("qemu64-x86_64-cpu").unwrap().unavailable.is_empty());
        assert!(known.cpu("Skylake-Client").is_none() && known.cpu("-cpu").is_none());
    }

    #[test]
    fn a_qemu_that_knows_the_legacy_acknowledgement_says_so() {
        assert!(!understood(SAID).unwrap().legacy_ack);
        let listed = concat!(
            r#"{"return": [{"name": "type", "type": "string"}, "#,
            r#"{"name": "switchover-ack-legacy", "type": "bool"}], "id": "migration"}"#,
            "\n"
        );
        assert!(understood(&format!("{SAID}{listed}")).unwrap().legacy_ack);
    }

    #[test]
    fn half_an_answer_is_none() {
        for end in [0, 10, 200, SAID.len() / 2] {
            assert_eq!(understood(&SAID[..end]), None);
        }
        let error = r#"{"id": "cpus", "error": {"class": "CommandNotFound", "desc": "no"}}"#;
        let cut = SAID.find(r#"{"return": [{"name": "Haswell""#).unwrap();
        let without = format!("{}{error}\n", &SAID[..cut]);
        assert_eq!(understood(&without).unwrap().cpus, []);
    }
}
