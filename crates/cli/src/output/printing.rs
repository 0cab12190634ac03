//! Writes the output of commands. If its reader has closed it, as `head` does, the rest is dropped.
//! The command still does its work, and its exit code is that of the work.
//!
//! Texts may be from a guest, whose serial console may be in QEMU's log, or from another host: what
//! steers terminals is taken out of them.

use std::borrow::Cow;
use std::fmt::Arguments;
use std::io::{self, Write};

use client::Problem;

/// Writes to standard output.
pub(crate) fn print(text: Arguments<'_>) -> Result<(), Problem> {
    print_raw(format_args!("{}", legible(&text.to_string())))
}

/// Writes to standard output as it is: for programs, and with colours.
pub(crate) fn print_raw(text: Arguments<'_>) -> Result<(), Problem> {
    write(&mut io::stdout().lock(), text)
}

/// Writes a line to standard output.
pub(crate) fn print_line(text: Arguments<'_>) -> Result<(), Problem> {
    print(format_args!("{text}\n"))
}

/// Writes a line to standard error.
pub(crate) fn eprint_line(text: Arguments<'_>) {
    let text = text.to_string();
    // A failure can't be reported anywhere.
    let _ = write(&mut io::stderr().lock(), format_args!("{}\n", legible(&text)));
}

/// A text without control characters, except those that end lines and separate columns.
pub(crate) fn legible(text: &str) -> Cow<'_, str> {
    let steers = |letter: char| letter.is_control() && !matches!(letter, '\n' | '\t');
    if text.contains(steers) {
        Cow::Owned(text.replace("\r\n", "\n").replace(steers, " "))
    } else {
        Cow::Borrowed(text)
    }
}

fn write(out: &mut impl Write, text: Arguments<'_>) -> Result<(), Problem> {
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
            Err(Problem::Local { what: "printing".to_owned(), source })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails in some way.
    struct Failing(io::ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn texts_of_others_do_not_steer_the_terminal() {
        // The end of a log with a guest's console, and C1 control characters.
        let log = "login:\r\n\u{1b}]0;root\u{7}\u{9b}2J\u{8}\tgone\n";
        assert_eq!(legible(log), "login:\n ]0;root  2J \tgone\n");
        assert!(matches!(legible("web1 läuft\n"), Cow::Borrowed("web1 läuft\n")));
    }

    #[test]
    fn only_a_reader_that_has_left_is_no_failure() {
        let write_to = |kind| write(&mut Failing(kind), format_args!("text"));
        assert!(write_to(io::ErrorKind::BrokenPipe).is_ok());
        assert!(write_to(io::ErrorKind::StorageFull).is_err());
    }
}
