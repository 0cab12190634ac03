//! A `qemu-nbd` that serves an image of any format to this process alone.
//!
//! It inherits a listening socket to which this process is already connected. So
//! there is no waiting until it is ready, the socket's file is deleted before it
//! runs, and it ends with this process, since it ends when its only client has
//! left. (A parent-death signal would be sent when the *thread* that started it
//! ends.)
//!
//! It opens the image although the VM has it locked, reads past the host's
//! page cache if it can, and never writes. The format's tables that it has in memory
//! may be stale; see the crate's documentation.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use host::child::exits_within;
use host::rights::{self, User};
use host::socket_dir::SocketDir;
use serde_json::{Value, json};

use crate::reader::{abandon, came_back};
use crate::{Layer, NfsFile, OpenError, Opening};

/// A shell knows its process id, which the program then has: the program accepts an
/// inherited socket only if `LISTEN_PID` is its own id.
const START: &str = "exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\"";
/// A shell's exit code if there is no such program.
const NOT_FOUND: i32 = 127;
/// How long it may take to end by itself.
const LEAVING: Duration = Duration::from_millis(200);
/// How long it may take to end once killed. It may hang with its storage.
const PARTING: Duration = Duration::from_secs(2);
/// Most bytes of its error output that are shown.
const WORDS_BYTES: usize = 1000;

/// A server of one image. It ends when this is dropped.
#[derive(Debug)]
pub struct Exporter {
    child: Option<Child>,
    words: File,
}

impl Exporter {
    /// Starts `qemu-nbd` for an image, with the rights of `how.user`.
    /// For a moment there is a socket in `how.dir`. Returns the connection to it; the
    /// export's name is empty.
    ///
    /// # Errors
    /// If there is no shell, or no file can be made in `how.dir`. A missing program or
    /// an unusable image shows only when the connection is used.
    pub fn start(
        how: &Opening,
        image: &Layer,
        direct: bool,
    ) -> Result<(Self, UnixStream), OpenError> {
        Self::serve(how, &options(image, direct, how.user.as_ref())?, direct)
    }

    /// The same for an image on an NFS server. That `qemu-nbd` lacks QEMU's NFS client shows only
    /// when the connection is used, too.
    pub(crate) fn of_nfs(how: &Opening, file: &NfsFile) -> Result<(Self, UnixStream), OpenError> {
        Self::serve(how, &nfs_options(file)?, true)
    }

    fn serve(
        how: &Opening,
        options: &Value,
        direct: bool,
    ) -> Result<(Self, UnixStream), OpenError> {
        let dir = &how.dir;
        let (listener, socket) = connected(dir).map_err(OpenError::Local)?;
        let words = tempfile::tempfile_in(dir).map_err(OpenError::Local)?;
        let own_words = words.try_clone().map_err(OpenError::Local)?;
        let mut command = Command::new("sh");
        command.args(["-c", START, "sh"]).arg(&how.qemu_nbd);
        command.args(["--read-only", "--shared=1", "--aio=threads"]);
        command.arg(if direct { "--cache=none" } else { "--cache=writeback" });
        command.arg(format!("json:{options}"));
        command.stdin(OwnedFd::from(listener)).stdout(Stdio::null()).stderr(words);
        // Signals from a terminal must not reach it.
        command.process_group(0);
        rights::start_as(command.current_dir("/"), how.user.as_ref());
        let child = command.spawn().map_err(OpenError::Program)?;
        Ok((Self { child: Some(child), words: own_words }, socket))
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Ends it, and returns the reason that it wrote, or `otherwise`.
    pub(crate) fn failed(mut self, what: &str, otherwise: &str) -> OpenError {
        let status = self.end();
        if status.is_some_and(|status| status.code() == Some(NOT_FOUND)) {
            return OpenError::Program(io::ErrorKind::NotFound.into());
        }
        let words = self.last_words().unwrap_or_default();
        let words = words.trim();
        OpenError::Image {
            what: what.to_owned(),
            reason: if words.is_empty() { otherwise.to_owned() } else { words.to_owned() },
        }
    }

    fn last_words(&mut self) -> io::Result<String> {
        let bytes = self.words.seek(SeekFrom::End(0))?;
        self.words.seek(SeekFrom::Start(bytes.saturating_sub(WORDS_BYTES as u64)))?;
        let mut words = Vec::new();
        (&self.words).take(WORDS_BYTES as u64).read_to_end(&mut words)?;
        Ok(String::from_utf8_lossy(&words).into_owned())
    }

    /// Ends it if it hasn't ended. It has nothing to lose.
    fn end(&mut self) -> Option<ExitStatus> {
        let mut child = self.child.take()?;
        // Without a client it ends by itself, and one that fails gets time to write why.
        if !exits_within(&mut child, LEAVING) {
            let _ = child.kill();
            if !exits_within(&mut child, PARTING) {
                leave_behind(child);
                return None;
            }
        }
        child.wait().ok()
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.end();
    }
}

/// Leaves behind a process that hangs in the kernel with its storage, and ends when
/// that answers.
fn leave_behind(mut child: Child) {
    abandon();
    let reap = data_threads::spawn("storage-reap", move || {
        let _ = child.wait();
        came_back();
    });
    if reap.is_err() {
        tracing::warn!("a hanging qemu-nbd is left behind without a thread that waits for it");
    }
}

/// A listening socket without a file, and a connection to it.
fn connected(dir: &Path) -> io::Result<(UnixListener, UnixStream)> {
    let (listener, private) = SocketDir::listen(dir, "nbd-")?;
    let socket = UnixStream::connect(private.socket())?;
    Ok((listener, socket))
}

/// The image in the form of QEMU's options.
fn options(image: &Layer, direct: bool, user: Option<&User>) -> Result<Value, OpenError> {
    Ok(only_read(layer(image, user)?, direct))
}

/// Options of an image that nothing is written to.
fn only_read(mut options: Value, direct: bool) -> Value {
    // The files below inherit these.
    options["read-only"] = true.into();
    options["force-share"] = true.into();
    options["cache"] = json!({ "direct": direct });
    options
}

/// The same of an image on an NFS server.
fn nfs_options(image: &NfsFile) -> Result<Value, OpenError> {
    check_format(&image.format, &image.to_string())?;
    let server = json!({ "type": "inet", "host": image.server });
    let mut file = json!({ "driver": "nfs", "server": server, "path": image.path });
    for (name, id) in [("user", image.user), ("group", image.group)] {
        if let Some(id) = id {
            file[name] = id.into();
        }
    }
    let options = json!({ "driver": image.format, "file": file, "backing": null });
    Ok(only_read(options, true))
}

/// Refuses what is not the name of a format.
fn check_format(format: &str, what: &str) -> Result<(), OpenError> {
    let known = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if format.is_empty() || !format.chars().all(known) {
        let reason = format!("'{format}' is not a format");
        return Err(OpenError::Image { what: what.to_owned(), reason });
    }
    Ok(())
}

/// An image and those behind it. A header's backing file is overridden by `null`, or by a format
/// over a file. With other options, such as a bare file's, QEMU opens what the header names, too.
fn layer(image: &Layer, user: Option<&User>) -> Result<Value, OpenError> {
    let Layer { path, format, data_file, backing } = image;
    check_format(format, &path.display().to_string())?;
    let backing = backing.as_deref().map(|backing| layer(backing, user)).transpose()?;
    let mut options = json!({ "driver": format, "file": file(path, user)?, "backing": backing });
    if let Some(data_file) = data_file {
        options["data-file"] = file(data_file, user)?;
    }
    Ok(options)
}

/// A file of this host.
fn file(path: &Path, user: Option<&User>) -> Result<Value, OpenError> {
    let unfit = |reason: String| OpenError::Image { what: path.display().to_string(), reason };
    let path = std::path::absolute(path).map_err(|error| unfit(error.to_string()))?;
    let name = path.to_str().ok_or_else(|| unfit("its name is not UTF-8".to_owned()))?;
    let seen = rights::with(user, || fs::metadata(&path)).and_then(|seen| seen);
    let kind = seen.map_err(|error| unfit(error.to_string()))?.file_type();
    let protocol = if kind.is_block_device() { "host_device" } else { "file" };
    Ok(json!({ "driver": protocol, "filename": name }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_can_not_add_options() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("a\",driver=null-co");
        fs::write(&image, [0; 512]).unwrap();
        let alone = |format: &str| options(&Layer::alone(image.clone(), format), true, None);
        let said = alone("qcow2").unwrap();
        let again: Value = serde_json::from_str(&said.to_string()).unwrap();
        assert_eq!(again["file"]["filename"].as_str(), image.to_str());
        for format in ["", "raw,x=y", "a.b", "ä"] {
            assert!(alone(format).is_err(), "{format}");
        }
        assert!(options(&Layer::alone(dir.path().join("nosuch"), "raw"), true, None).is_err());
    }

    #[test]
    fn nothing_is_left_to_what_headers_say() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["top", "data", "base"] {
            fs::write(at(name), [0; 512]).unwrap();
        }
        let base = Layer { data_file: Some(at("data")), ..Layer::alone(at("base"), "qcow2") };
        let top = Layer { backing: Some(Box::new(base)), ..Layer::alone(at("top"), "qcow2") };
        let file = |name: &str| json!({ "driver": "file", "filename": at(name) });
        let base = json!({ "driver": "qcow2", "file": file("base"), "data-file": file("data"),
            "backing": null });
        let expected = json!({ "driver": "qcow2", "file": file("top"), "backing": base,
            "read-only": true, "force-share": true, "cache": { "direct": false } });
        assert_eq!(options(&top, false, None).unwrap(), expected);
    }

    #[test]
    fn an_image_on_an_nfs_server_is_only_read() {
        let image = NfsFile {
            server: "10.0.0.1".to_owned(),
            path: "/vms/a\",b".to_owned(),
            user: Some(64055),
            group: None,
            format: "qcow2".to_owned(),
        };
        let file = json!({ "driver": "nfs", "server": { "type": "inet", "host": "10.0.0.1" },
            "path": "/vms/a\",b", "user": 64055 });
        let expected = json!({ "driver": "qcow2", "file": file, "backing": null,
            "read-only": true, "force-share": true, "cache": { "direct": true } });
        assert_eq!(nfs_options(&image).unwrap(), expected);
        let odd = NfsFile { format: "raw,x=y".to_owned(), ..image };
        assert!(nfs_options(&odd).unwrap_err().to_string().contains("nfs://10.0.0.1/vms"));
    }
}
