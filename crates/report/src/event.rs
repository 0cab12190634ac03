//! An agent's event as a line of text.

use api::{Event, GangOutcome, GapReason, Happening, MigrationResult};

use super::{amount, date, full_stop, phase_name};

/// The line for an event's data; an event that only newer agents know is shown unchanged.
#[must_use]
pub fn line(data: &str) -> String {
    match serde_json::from_str::<Event>(data) {
        Ok(event) => {
            let at = date::utc_to_the_second(event.at_unix_ms / 1000);
            format!("{at}  {}", described(&event.what))
        }
        Err(_) => data.to_owned(),
    }
}

fn described(what: &Happening) -> String {
    match what {
        Happening::Gap { why } => match why {
            GapReason::TooOld => "Events are missing here: there were more than the agent keeps.",
            GapReason::Restarted => "Events may be missing here: the agent was restarted.",
            GapReason::Unknown => {
                "Events may be missing here: the agent doesn't know the last one."
            }
        }
        .to_owned(),
        Happening::MigrationBegan { migration, vm, from, to } => {
            format!("{vm}: migration {migration} from {from} to {to} starts.")
        }
        Happening::MigrationPhase { migration, vm, phase } => {
            format!("{vm}: migration {migration}: {}.", phase_name(*phase))
        }
        Happening::MigrationEnded {
            migration,
            vm,
            to,
            result,
            reason,
            downtime_ms,
            total_s,
            ..
        } => {
            let took = amount::seconds(*total_s);
            match result {
                MigrationResult::Done => {
                    let downtime = downtime_ms.map_or_else(String::new, |ms| {
                        format!(", with a downtime of {}", amount::milliseconds(ms))
                    });
                    format!("{vm}: migration {migration}: at {to} after {took}{downtime}.")
                }
                MigrationResult::Failed => {
                    let reason = full_stop(reason.as_deref().unwrap_or("no reason is known"));
                    format!("{vm}: migration {migration} failed after {took}: {reason}")
                }
                MigrationResult::Cancelled => {
                    format!("{vm}: migration {migration} was cancelled after {took}.")
                }
            }
        }
        Happening::ArrivalBegan { migration, vm, from } => {
            format!("{vm}: arrives from {from} with migration {migration}.")
        }
        Happening::ArrivalEnded { migration, vm, from, arrived } => {
            let how = if *arrived { "has arrived" } else { "has not arrived" };
            format!("{vm}: {how} from {from} with migration {migration}.")
        }
        Happening::GangBegan { gang, vms } => {
            format!("Gang {gang} starts: {}.", amount::counted(*vms as u64, "VM"))
        }
        Happening::GangEnded { gang, result, done, failed, cancelled, total_s } => {
            let how = match result {
                GangOutcome::Done => "is done",
                GangOutcome::Failed => "failed",
                GangOutcome::Cancelled => "was cancelled",
                GangOutcome::Interrupted => "was interrupted",
            };
            let took = amount::seconds(*total_s);
            format!(
                "Gang {gang} {how} after {took}: {done} moved, {failed} failed, {cancelled} \
                 cancelled."
            )
        }
        Happening::VmInDoubt { vm, problem } => format!("{vm}: in doubt: {}", full_stop(problem)),
        Happening::VmSettled { vm } => format!("{vm}: no longer in doubt."),
        Happening::CertificateRenewed { until_unix_s } => {
            format!("The certificate was renewed, until {}.", until(*until_unix_s))
        }
        Happening::CertificateExpires { problem, .. } => full_stop(problem),
    }
}

fn until(unix_s: i64) -> String {
    date::utc_to_the_minute(u64::try_from(unix_s).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_a_line_with_its_time() {
        let end = r#"{"id":"0f-9","at_unix_ms":1709210096789,"event":"migration-ended","migration":"deadbeef","vm":"web1","from":"a","to":"b","result":"done","reason":null,"downtime_ms":38.2,"total_s":4.5}"#;
        assert_eq!(
            line(end),
            "2024-02-29 12:34:56 UTC  web1: migration deadbeef: at b after 4.50 s, with a downtime \
             of 38 ms."
        );
        let failed = end.replace("done", "failed").replace("null", r#""b said no""#);
        assert!(line(&failed).ends_with("failed after 4.50 s: b said no."), "{}", line(&failed));
    }

    #[test]
    fn an_event_of_a_newer_agent_is_shown_unchanged() {
        let newer = r#"{"id":"0f-9","at_unix_ms":0,"event":"vm-flew","vm":"web1"}"#;
        assert_eq!(line(newer), newer);
    }
}
