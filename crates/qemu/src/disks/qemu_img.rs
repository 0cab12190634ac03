//! `qemu-img`: examines images and creates them.
//!
//! The format is always given, never detected: a guest writes the content of a
//! raw image, and could make it look like any other. The tool runs as QEMU's user,
//! and gets images as open files, since another host chooses their names and
//! content.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use host::child::Run;
use serde_json::Value;

use super::{Format, ImageProblem, Qcow2};
use crate::launch::{User, prepare_child};

/// How long it may be silent.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Most output that is read; an image with thousands of snapshots fits.
const OUTPUT_MAX: u64 = 4 << 20;

/// The tool.
#[derive(Clone, Debug)]
pub struct QemuImg {
    program: PathBuf,
    user: Option<User>,
}

impl QemuImg {
    /// Runs this program as that user; `None` is the agent's own. Images are opened
    /// and created with that user's rights, too.
    #[must_use]
    pub fn new(program: PathBuf, user: Option<&User>) -> Self {
        Self { program, user: user.cloned() }
    }

    /// The user that it runs as; `None` is the agent's own.
    pub(super) fn user(&self) -> Option<&User> {
        self.user.as_ref()
    }

    /// Information about an image. Fails if the image is in use.
    pub(super) fn info(&self, driver: &str, image: &File) -> Result<Value, ImageProblem> {
        let run = self.run(&["info", "--output=json", "-f", driver], image, &[])?;
        serde_json::from_slice(&printed(run)?)
            .map_err(|_| ImageProblem::Tool("qemu-img printed nothing".into()))
    }

    /// Whether there is nothing but holes and zeros in an image.
    pub(super) fn is_empty(&self, driver: &str, image: &File) -> Result<bool, ImageProblem> {
        let run = self.run(&["map", "--output=json", "-f", driver], image, &[])?;
        // One extent per line; a large image has millions.
        let (mut lines, mut line) = (BufReader::new(&run.out), String::new());
        while (&mut lines).take(OUTPUT_MAX).read_line(&mut line).map_err(|_| silent())? > 0 {
            if line.contains("\"data\": true") && !line.contains("\"zero\": true") {
                return Ok(false);
            }
            line.clear();
        }
        printed(run).map(|_| true)
    }

    /// Creates an image without content in an empty file.
    pub(super) fn create(
        &self,
        format: &Format,
        image: &File,
        bytes: u64,
    ) -> Result<(), ImageProblem> {
        let options = match format {
            Format::Raw => None,
            Format::Qcow2(qcow2) => Some(qcow2_options(qcow2)?),
        };
        let mut arguments = vec!["create", "-q", "-f", format.driver()];
        if let Some(options) = &options {
            arguments.extend(["-o", options.as_str()]);
        }
        printed(self.run(&arguments, image, &[&bytes.to_string()])?).map(drop)
    }

    fn run(&self, before: &[&str], image: &File, after: &[&str]) -> Result<Run, ImageProblem> {
        let mut command = Command::new(&self.program);
        command
            .args(before)
            .arg("--")
            .arg(format!("/proc/self/fd/{}", image.as_raw_fd()))
            .args(after)
            .stdin(Stdio::null());
        prepare_child(&mut command, &[image.as_fd()], self.user(), None);
        Run::start(command, SILENCE_MAX).map_err(|error| {
            ImageProblem::Tool(format!("{} can't be started: {error}", self.program.display()))
        })
    }
}

fn silent() -> ImageProblem {
    ImageProblem::Tool("qemu-img does not answer".to_owned())
}

/// What a run prints until its end.
fn printed(mut run: Run) -> Result<Vec<u8>, ImageProblem> {
    let (out, errors) = run.read(OUTPUT_MAX).map_err(|_| silent())?;
    if run.status()?.ok_or_else(silent)?.success() {
        return Ok(out);
    }
    let errors = String::from_utf8_lossy(&errors);
    let line = errors.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let line = line.trim_start_matches("qemu-img: ").to_owned();
    if line.contains(" lock") {
        return Err(ImageProblem::InUse { output: line });
    }
    Err(ImageProblem::Tool(line))
}

/// The source's options for qcow2, if they are valid.
fn qcow2_options(qcow2: &Qcow2) -> Result<String, ImageProblem> {
    let odd = |what: &str| Err(ImageProblem::Impossible(what.to_owned()));
    if !qcow2.cluster_bytes.is_power_of_two()
        || !(512..=2 << 20).contains(&qcow2.cluster_bytes)
        || !qcow2.refcount_bits.is_power_of_two()
        || qcow2.refcount_bits > 64
    {
        return odd("its clusters or reference counts have no possible size");
    }
    let cluster = format!("cluster_size={}", qcow2.cluster_bytes);
    match qcow2.compat.as_str() {
        "0.10" => Ok(format!("compat=0.10,{cluster}")),
        "1.1" => {
            let switch = |on: bool| if on { "on" } else { "off" };
            // Older tools don't know the option, which is off in them.
            let extended = if qcow2.extended_l2 { ",extended_l2=on" } else { "" };
            Ok(format!(
                "compat=1.1,{cluster},lazy_refcounts={},refcount_bits={}{extended}",
                switch(qcow2.lazy_refcounts),
                qcow2.refcount_bits
            ))
        }
        _ => odd("its version of qcow2 is not known"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_options_of_a_peer_are_refused() {
        let usual = Qcow2::default();
        assert_eq!(
            qcow2_options(&usual).unwrap(),
            "compat=1.1,cluster_size=65536,lazy_refcounts=off,refcount_bits=16"
        );
        let old = Qcow2 { compat: "0.10".to_owned(), ..usual.clone() };
        assert_eq!(qcow2_options(&old).unwrap(), "compat=0.10,cluster_size=65536");
        for odd in [
            Qcow2 { compat: "1.1,backing_file=/etc/shadow".to_owned(), ..usual.clone() },
            Qcow2 { cluster_bytes: 3, ..usual.clone() },
            Qcow2 { cluster_bytes: 1 << 40, ..usual.clone() },
            Qcow2 { refcount_bits: 0, ..usual.clone() },
            Qcow2 { refcount_bits: 128, ..usual },
        ] {
            assert!(qcow2_options(&odd).is_err(), "{odd:?}");
        }
    }

    #[test]
    fn a_missing_program_is_named() {
        let tool = QemuImg::new("/nonexistent/qemu-img".into(), None);
        let image = File::open("/dev/null").unwrap();
        let error = tool.info("raw", &image).unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent/qemu-img can't be started"), "{error}");
    }
}
