//! A terminal of some size with a program in it: its screen, and keys for it.

use std::io::{Read, Write};
use std::num::NonZero;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::thread;

use lab::agent::Agent;
use lab::hosts::Host;
use parking_lot::Mutex;

use crate::world::until;

const ROWS: NonZero<u16> = NonZero::new(50).unwrap();
const COLUMNS: NonZero<u16> = NonZero::new(140).unwrap();

/// A program in a terminal.
pub struct Terminal {
    child: Child,
    keys: ChildStdin,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Terminal {
    /// Runs `droveway` with these arguments on a host.
    ///
    /// # Panics
    /// If it can't be started; all functions of this file panic on failure.
    #[must_use]
    pub fn start(host: &Host, agent: &Agent, args: &[&str]) -> Self {
        let inside = agent.command(host, args);
        // Quoted for the shell that `script` runs.
        let words: Vec<String> = std::iter::once(inside.get_program())
            .chain(inside.get_args())
            .map(|word| format!("'{}'", word.to_str().unwrap()))
            .collect();
        let line = format!("stty rows {ROWS} cols {COLUMNS}; exec {}", words.join(" "));
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &line, "/dev/null"]);
        command.env("TERM", "xterm-256color").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (keys, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let screen = Arc::new(Mutex::new(vt100::Parser::new(ROWS, COLUMNS, 0)));
        thread::spawn({
            let screen = Arc::clone(&screen);
            move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = output.read(&mut bytes) {
                    screen.lock().process(&bytes[..count]);
                }
            }
        });
        Self { child, keys, screen }
    }

    /// The text on the screen.
    #[must_use]
    pub fn text(&self) -> String {
        self.screen.lock().screen().contents()
    }

    /// Waits until this text is on the screen.
    ///
    /// # Panics
    /// If it doesn't appear.
    pub fn wait(&self, text: &str) {
        until(&format!("{text:?} is shown"), || self.text().contains(text));
    }

    /// Presses keys.
    ///
    /// # Panics
    /// If the program has closed its input.
    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
    }

    /// Waits for the program's end; whether it succeeded, and left the terminal as it was.
    ///
    /// # Panics
    /// If it doesn't end.
    #[must_use]
    pub fn ends_well(mut self) -> bool {
        until("it ends", || self.child.try_wait().unwrap().is_some());
        let status = self.child.wait().unwrap();
        let parser = self.screen.lock();
        status.success() && !parser.screen().alternate_screen() && !parser.screen().hide_cursor()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // After its end there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
