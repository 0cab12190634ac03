//! The tap devices of an arriving VM's network cards.
//!
//! QEMU makes one that is missing, if it runs as root, and puts it on no bridge: the VM arrives, and
//! has no network. Only a script that QEMU runs may connect it.

use facts::host::Tap as State;
use qemu::command_line::Tap;

use crate::denied::Denied;

/// More than a VM has network cards.
const TAPS_MAX: usize = 256;
/// Taps that are named in a refusal.
const NAMED_MAX: usize = 8;

/// Checks taps for which no script is run, before QEMU makes those that are missing, and returns
/// notes about them. One that is missing or down has to be `accepted`.
pub(super) fn before(
    taps: &[Tap],
    accepted: bool,
    state: impl Fn(&str) -> State,
) -> Result<Vec<String>, Denied> {
    let found = taps.iter().filter(|tap| tap.script.is_none()).take(TAPS_MAX);
    let found: Vec<(&Tap, State)> = found.map(|tap| (tap, state(&tap.name))).collect();
    let offline = |(tap, state): &(&Tap, State)| match state {
        State::Missing => Some(format!("there is no tap {}", tap.name)),
        State::Down => Some(format!("the tap {} is down, or its bridge is", tap.name)),
        State::Unknown | State::Alone | State::Connected => None,
    };
    let offline: Vec<String> = found.iter().filter_map(offline).take(NAMED_MAX).collect();
    if accepted || offline.is_empty() {
        return Ok(found.into_iter().filter_map(note).collect());
    }
    Err(Denied::Conflict(format!(
        "{}, so the VM would have no network: create it and bring it up on the VM's bridge there, \
         or name another with --set; --accept-missing-taps moves the VM anyway",
        offline.join(", ")
    )))
}

/// Notes about taps for which QEMU has run a script.
pub(super) fn after(taps: &[Tap], state: impl Fn(&str) -> State) -> Vec<String> {
    let scripted = taps.iter().filter(|tap| tap.script.is_some()).take(TAPS_MAX);
    scripted.map(|tap| (tap, state(&tap.name))).filter_map(note).collect()
}

fn note((tap, state): (&Tap, State)) -> Option<String> {
    let is = match state {
        State::Missing => {
            "was missing at the destination, and a tap that QEMU creates is on no bridge"
        }
        State::Down => "is down at the destination, or its bridge is",
        State::Alone => {
            "is on no bridge at the destination, which has no address and no route there"
        }
        State::Unknown | State::Connected => return None,
    };
    let ran = tap.script.as_ref().map_or_else(String::new, |script| format!(" ({script} was run)"));
    Some(format!("the VM's tap {}{ran} {is}: the VM may have no network", tap.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tap(name: &str, script: Option<&str>) -> Tap {
        Tap { name: name.to_owned(), script: script.map(str::to_owned) }
    }

    fn state(name: &str) -> State {
        match name {
            "missing" => State::Missing,
            "down" => State::Down,
            "alone" => State::Alone,
            "unknown" => State::Unknown,
            _ => State::Connected,
        }
    }

    #[test]
    fn what_leaves_a_vm_offline_has_to_be_accepted() {
        let taps = |names: &[&str]| names.iter().map(|name| tap(name, None)).collect::<Vec<_>>();
        let check = |names: &[&str], accepted| before(&taps(names), accepted, state);
        assert_eq!(check(&["t0", "unknown"], false), Ok(Vec::new()));
        let notes = check(&["t0", "alone"], false).unwrap();
        assert_eq!(notes.len(), 1);
        assert!(notes[0].starts_with("the VM's tap alone is on no bridge"), "{notes:?}");
        let why = check(&["missing", "t0", "down"], false).unwrap_err().to_string();
        assert!(why.starts_with("there is no tap missing, the tap down is down, or its"), "{why}");
        assert!(why.contains("--accept-missing-taps"), "{why}");
        let notes = check(&["missing", "t0", "down"], true).unwrap();
        assert_eq!(notes.len(), 2);
        assert!(notes[0].contains("tap missing was missing"), "{notes:?}");
        let many: Vec<&str> = std::iter::repeat_n("down", 1000).collect();
        assert!(check(&many, false).unwrap_err().to_string().len() < 600);
    }

    #[test]
    fn a_script_may_connect_what_is_missing_before() {
        let taps = [tap("missing", Some("/up")), tap("t0", Some("/up")), tap("down", None)];
        assert_eq!(before(&taps[..2], false, state), Ok(Vec::new()));
        let notes = after(&taps, state);
        assert_eq!(notes.len(), 1);
        assert!(
            notes[0].starts_with("the VM's tap missing (/up was run) was missing"),
            "{notes:?}"
        );
    }
}
