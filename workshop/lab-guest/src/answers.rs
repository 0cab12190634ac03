//! The guest's answers to commands.

use std::process::Command;
use std::sync::atomic::Ordering;

use lab_guest::burn::Burner;
use lab_guest::files::{Files, Way};
use lab_guest::memory::Checked;

use crate::{DISK, FILE, Guest, lock, system};

impl Guest {
    pub(crate) fn answer(&self, command: &str) -> Result<String, String> {
        let (verb, rest) = command.split_once(' ').unwrap_or((command, ""));
        match verb {
            "hello" => Ok(self.greeting()),
            "check" => self.check(),
            "check-disk" => self.check_disk(),
            "files" => self.on_files(|files| files.read()),
            "files-change" => self.change_files(rest, Way::Cache),
            "files-direct" => self.change_files(rest, Way::Direct),
            "files-check" => self.check_files(),
            "churn" => {
                self.churning.set(rest == "on");
                self.churning.done()
            }
            "files-sync" => {
                rustix::fs::sync();
                Ok(String::new())
            }
            "files-read-only" => self.on_files(Files::make_read_only),
            "files-drop" => dropped(system::Caches::All),
            "cache-check" => {
                let one_of = rest.parse().map_err(|_| format!("{rest:?} is no number"))?;
                self.check_cache(one_of)
            }
            "cache-drop" => dropped(system::Caches::Contents),
            "files-forget-names" => dropped(system::Caches::Names),
            "helper" => self.helper.woken().map_err(|error| error.to_string()),
            "helper-works" => {
                self.helper.works().map(|it| it.to_string()).map_err(|error| error.to_string())
            }
            "helper-kill" => done(self.helper.end()),
            "helper-start" => done(self.helper.start()),
            "helper-lie" => done(self.helper.lie(rest)),
            "helper-asked" => done(self.helper.hear("asked")),
            "helper-told" => done(self.helper.hear("told")),
            "helper-go" => done(self.helper.go()),
            "memory" => system::memory().map_err(|error| error.to_string()),
            "status" => Ok(self.status()),
            "forget" => {
                self.worst_tick_us.store(0, Ordering::Relaxed);
                Ok(String::new())
            }
            "pause" => self.set_rate(0),
            "resume" => self.set_rate(self.orders.rate),
            "rate" => {
                let rate = rest.parse().map_err(|_| format!("{rest:?} is no rate"))?;
                self.set_rate(rate)
            }
            "burst" => {
                lock(&self.swing).restart(self.began.elapsed());
                Ok(String::new())
            }
            "sh" => shell(rest),
            "reboot" => system::end(rustix::system::RebootCommand::Restart),
            "poweroff" => system::end(rustix::system::RebootCommand::PowerOff),
            _ => Err(format!("unknown command {verb:?}")),
        }
    }

    fn set_rate(&self, rate: u64) -> Result<String, String> {
        lock(&self.pacer).set_rate(rate);
        Ok(format!("rate={rate}"))
    }

    fn check(&self) -> Result<String, String> {
        let mut checked = Checked::default();
        for area in &self.fixed {
            checked.add(area.check().into());
        }
        self.wanted.store(true, Ordering::Relaxed);
        let writer = lock(&self.writer);
        self.wanted.store(false, Ordering::Relaxed);
        checked.add(writer.area().check().into());
        checked.add(writer.wrong().into());
        let file = self.file.check().map_err(|error| format!("{FILE}: {error}"))?;
        checked.add(file.unwrap_or_default());
        Ok(shown(checked))
    }

    fn check_disk(&self) -> Result<String, String> {
        let checked = self.disk.check().map_err(|error| format!("{DISK}: {error}"))?;
        let checked = checked.ok_or("there is no disk")?;
        Ok(format!("written={} {}", self.disk.written(), shown(checked)))
    }

    fn check_cache(&self, one_of: usize) -> Result<String, String> {
        let load = self.load.as_ref().ok_or("there are no cached files")?;
        load.check(one_of).map(shown).map_err(|error| error.to_string())
    }

    fn on_files(
        &self,
        work: impl FnOnce(&mut Files) -> std::io::Result<u64>,
    ) -> Result<String, String> {
        let mut files = lock(&self.files);
        let files = files.as_mut().ok_or("there are no files")?;
        work(files).map(|pages| format!("pages={pages}")).map_err(|error| error.to_string())
    }

    /// Arguments: `PAGES`, or `FIRST PAGES`.
    fn change_files(&self, rest: &str, way: Way) -> Result<String, String> {
        let (first, pages) = rest.split_once(' ').unwrap_or(("0", rest));
        let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is no number"));
        let (first, pages) = (number(first)?, number(pages)?);
        self.on_files(|files| files.change(first, pages, way))
    }

    /// Reads and checks all files on disks, those that change included.
    fn check_files(&self) -> Result<String, String> {
        let files = lock(&self.files);
        let files = files.as_ref().ok_or("there are no files")?;
        let mut checked = files.check().map_err(|error| error.to_string())?;
        checked.add(self.churning.check()?);
        Ok(shown(checked))
    }

    fn status(&self) -> String {
        format!(
            "ticks={} written={} rate={} worst_tick_us={} computed={} fastest={} wrong_answers={}",
            self.ticks.load(Ordering::Relaxed),
            self.written.load(Ordering::Relaxed),
            lock(&self.pacer).rate(),
            self.worst_tick_us.load(Ordering::Relaxed),
            self.computed.load(Ordering::Relaxed),
            self.burner.as_ref().map_or(0, Burner::fastest),
            self.wrong_answers.load(Ordering::Relaxed),
        )
    }
}

/// Runs a line by a shell, which only a guest with a whole system has. An answer is one line: those
/// of the output are joined.
fn shell(line: &str) -> Result<String, String> {
    let output = Command::new("sh").args(["-c", line]).output();
    let output = output.map_err(|error| format!("no shell: {error}"))?;
    let joined = |bytes: &[u8]| {
        String::from_utf8_lossy(bytes).lines().map(str::trim_end).collect::<Vec<_>>().join(" | ")
    };
    if output.status.success() {
        return Ok(joined(&output.stdout));
    }
    Err(format!("{}: {} {}", output.status, joined(&output.stderr), joined(&output.stdout)))
}

fn dropped(caches: system::Caches) -> Result<String, String> {
    done(system::drop_caches(caches))
}

fn done(result: std::io::Result<()>) -> Result<String, String> {
    result.map(|()| String::new()).map_err(|error| error.to_string())
}

fn shown(checked: Checked) -> String {
    let first = checked.first_wrong.unwrap_or_else(|| "none".to_owned());
    format!("pages={} wrong={} first={first}", checked.pages, checked.wrong)
}
