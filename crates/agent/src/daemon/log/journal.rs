//! systemd's journal.
//!
//! An entry has the text that standard error would get, its priority, and the migration and VM that
//! it is about: `DROVEWAY_MIGRATION` and `DROVEWAY_VM`, as for `journalctl DROVEWAY_VM=web1`.

use std::env;
use std::fmt::{Debug, Write};
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use rustix::fs::fstat;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, Scope};

const SOCKET: &str = "/run/systemd/journal/socket";
/// A length that surely fits one datagram; a longer line is cut.
const TEXT_MAX: usize = 48 << 10;
/// The span (empty: any, or the event itself), its field, and the journal's field.
const FIELDS: [(&str, &str, &str); 3] = [
    ("migration", "id", "DROVEWAY_MIGRATION"),
    ("", "migration", "DROVEWAY_MIGRATION"),
    ("", "vm", "DROVEWAY_VM"),
];

/// The journal's socket.
pub(super) struct Journal(UnixDatagram);

/// The recorded fields and message of a span or an event.
#[derive(Debug, Default)]
struct Recorded {
    message: String,
    fields: Vec<(&'static str, Value)>,
}

#[derive(Debug)]
struct Value {
    plain: String,
    /// As shown in a line: text in quotation marks.
    shown: String,
}

impl Journal {
    /// The journal, if systemd started this program with its standard error connected to it.
    pub(super) fn of_this_service() -> Option<Self> {
        let stream = env::var("JOURNAL_STREAM").ok()?;
        let (device, inode) = stream.split_once(':')?;
        let stderr = fstat(io::stderr()).ok()?;
        let is_stderr = device.parse() == Ok(stderr.st_dev) && inode.parse() == Ok(stderr.st_ino);
        is_stderr.then(|| Self::at(Path::new(SOCKET)).ok()).flatten()
    }

    fn at(socket: &Path) -> io::Result<Self> {
        let journal = UnixDatagram::unbound()?;
        journal.connect(socket)?;
        Ok(Self(journal))
    }
}

impl Visit for Recorded {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => {
                let value = Value { plain: value.to_owned(), shown: format!("{value:?}") };
                self.fields.push((name, value));
            }
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let shown = format!("{value:?}");
        match field.name() {
            "message" => self.message = shown,
            name => self.fields.push((name, Value { plain: shown.clone(), shown })),
        }
    }
}

impl Recorded {
    fn show(&self) -> String {
        let fields = self.fields.iter().map(|(name, value)| format!("{name}={}", value.shown));
        fields.collect::<Vec<_>>().join(" ")
    }

    /// The journal's fields from a span of this name, or from an event if the name is empty.
    fn journal_fields<'s>(&'s self, span: &str) -> impl Iterator<Item = (&'static str, &'s str)> {
        FIELDS.into_iter().filter(move |(of, _, _)| of.is_empty() || *of == span).filter_map(
            |(_, name, field)| {
                let (_, value) = self.fields.iter().find(|(recorded, _)| *recorded == name)?;
                Some((field, value.plain.as_str()))
            },
        )
    }
}

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for Journal {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut recorded = Recorded::default();
        attributes.record(&mut recorded);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(recorded);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let meta = event.metadata();
        let mut recorded = Recorded::default();
        event.record(&mut recorded);
        let (mut text, mut entry) = (String::new(), Vec::new());
        for span in context.event_scope(event).into_iter().flat_map(Scope::from_root) {
            let extensions = span.extensions();
            let Some(of_span) = extensions.get::<Recorded>() else { continue };
            let _ = write!(text, "{}{{{}}}: ", span.name(), of_span.show());
            of_span
                .journal_fields(span.name())
                .for_each(|(name, value)| put(&mut entry, name, value));
        }
        recorded.journal_fields("").for_each(|(name, value)| put(&mut entry, name, value));
        let _ = write!(text, "{}: {} {}", meta.target(), recorded.message, recorded.show());
        put(&mut entry, "MESSAGE", cut(text.trim_end()));
        put(&mut entry, "PRIORITY", priority(*meta.level()));
        put(&mut entry, "SYSLOG_IDENTIFIER", "droveway");
        // An error could not be reported anywhere.
        let _ = self.0.send(&entry);
    }
}

/// The level's number in `syslog`.
fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        Level::DEBUG | Level::TRACE => "7",
    }
}

/// The part of a text that fits an entry.
fn cut(text: &str) -> &str {
    let end = (0..=TEXT_MAX.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// Adds a field in the journal's protocol, where a value of several lines has its length.
fn put(entry: &mut Vec<u8>, name: &str, value: &str) {
    entry.extend(name.bytes());
    if value.contains('\n') {
        entry.push(b'\n');
        entry.extend((value.len() as u64).to_le_bytes());
    } else {
        entry.push(b'=');
    }
    entry.extend(value.bytes());
    entry.push(b'\n');
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// The entries that the journal receives while `log` runs.
    fn received(log: impl FnOnce()) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let socket = UnixDatagram::bind(&path).unwrap();
        let journal = Journal::at(&path).unwrap();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(journal), log);
        socket.set_nonblocking(true).unwrap();
        let mut bytes = vec![0; 1 << 17];
        let mut entries = Vec::new();
        while let Ok(count) = socket.recv(&mut bytes) {
            entries.push(String::from_utf8_lossy(&bytes[..count]).into_owned());
        }
        entries
    }

    #[test]
    fn a_line_has_its_text_its_priority_and_what_it_is_about() {
        let target = module_path!();
        let entries = received(|| {
            let span = data_threads::migration_span("deadbeef", "web1");
            span.in_scope(|| tracing::warn!(error = "no room", left = 3, "it ends"));
            tracing::info!(vm = "web2", "started");
            tracing::error!("alone");
        });
        let expected = [
            format!(
                "DROVEWAY_MIGRATION=deadbeef\nDROVEWAY_VM=web1\nMESSAGE=migration{{id=deadbeef \
                 vm=\"web1\"}}: {target}: it ends error=\"no room\" left=3\nPRIORITY=4\n\
                 SYSLOG_IDENTIFIER=droveway\n"
            ),
            format!(
                "DROVEWAY_VM=web2\nMESSAGE={target}: started vm=\"web2\"\nPRIORITY=6\n\
                 SYSLOG_IDENTIFIER=droveway\n"
            ),
            format!("MESSAGE={target}: alone\nPRIORITY=3\nSYSLOG_IDENTIFIER=droveway\n"),
        ];
        assert_eq!(entries, expected);
    }

    #[test]
    fn a_text_of_several_lines_makes_no_fields_of_its_own() {
        let mut entry = Vec::new();
        put(&mut entry, "MESSAGE", "a\nPRIORITY=0");
        let expected =
            [b"MESSAGE\n".as_slice(), &12_u64.to_le_bytes(), b"a\nPRIORITY=0\n"].concat();
        assert_eq!(entry, expected);
    }

    #[test]
    fn a_line_without_end_is_cut_between_two_letters() {
        let entries = received(|| tracing::error!("{}", "ä".repeat(TEXT_MAX)));
        assert!(entries[0].len() < TEXT_MAX + 100 && entries[0].len() > TEXT_MAX - 100);
        assert!(!entries[0].contains('\u{fffd}'));
    }
}
