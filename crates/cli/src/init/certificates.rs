//! Existing certificates, which are never replaced.

use std::path::Path;
use std::time::SystemTime;

use client::Problem;
use identity::{Files, Identity, Person, Subject};

use crate::output::quoted;

/// A certificate that was found.
pub(crate) struct Found {
    /// A warning for the operator, if it expires soon.
    pub(crate) warning: Option<String>,
}

/// Looks for a subject's certificate in `place`; one that can't be used is an error.
pub(crate) fn find(
    authority: &Path,
    place: &Path,
    subject: &Subject,
) -> Result<Option<Found>, Problem> {
    let files = Files::within(place);
    let mut needed = vec![&files.authority, &files.certificate, &files.key];
    if matches!(subject, Subject::Host(_)) {
        needed.push(&files.content_key);
    }
    let there = needed.iter().filter(|file| file.exists()).count();
    if there == 0 {
        return Ok(None);
    }
    let again = again(authority, subject);
    if there < needed.len() {
        let message =
            format!("{} is not complete: create it again with `{again}`", place.display());
        return Err(Problem::Typed(message));
    }
    let warning = match subject {
        Subject::Host(name) => Identity::load(name, &files)?.warning(SystemTime::now()),
        Subject::Client { .. } => {
            let found = Person::load(&files)?;
            if found.subject() != subject {
                return Err(Problem::Typed(format!(
                    "{} has the certificate of {}, and {subject} is expected: create it again with \
                     `{again}`, or choose another name with --operator",
                    place.display(),
                    found.subject()
                )));
            }
            None
        }
    };
    Ok(Some(Found { warning: warning.map(|warning| format!("{warning} with `{again}`")) }))
}

fn again(authority: &Path, subject: &Subject) -> String {
    let role = match subject {
        Subject::Host(_) => String::new(),
        Subject::Client { role, .. } => format!(" --role {role}"),
    };
    let dir = quoted(&authority.to_string_lossy());
    format!("droveway ca issue {}{role} --dir {dir} --replace", subject.name())
}
