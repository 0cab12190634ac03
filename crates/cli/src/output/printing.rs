//! Writes the output of commands. If its reader has closed it, as `head` does, the rest is dropped.
//! The command still does its work, and its exit code is that of the work.

use std::fmt::Arguments;
use std::io::{self, Write};

use crate::problem::Problem;

/// Writes to standard output.
pub(crate) fn print(text: Arguments<'_>) -> Result<(), Problem> {
    write(&mut io::stdout().lock(), text)
}

/// Writes a line to standard output.
pub(crate) fn print_line(text: Arguments<'_>) -> Result<(), Problem> {
    print(format_args!("{text}\n"))
}

/// Writes a line to standard error.
pub(crate) fn eprint_line(text: Arguments<'_>) {
    // A failure can't be reported anywhere.
    let _ = write(&mut io::stderr().lock(), format_args!("{text}\n"));
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
    fn only_a_reader_that_has_left_is_no_failure() {
        let write_to = |kind| write(&mut Failing(kind), format_args!("text"));
        assert!(write_to(io::ErrorKind::BrokenPipe).is_ok());
        assert!(write_to(io::ErrorKind::StorageFull).is_err());
    }
}
