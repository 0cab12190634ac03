use std::cell::Cell;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nbd::client::{ClientError, Failure, Outcome, Settings};
use nbd::{Client, Errno};
use qemu::process::Process;
use tempfile::tempdir;

use crate::vm::Vm;
use crate::{noise, say};

const MIB: usize = 1 << 20;
const DISK: usize = 64 * MIB;

/// A qemu-nbd that ends with the test.
struct Nbd(Process);

impl Nbd {
    /// Starts it; with `--fork` it listens when this returns.
    fn start(dir: &Path, arguments: &str) -> Self {
        let at = dir.display();
        let common = format!("--fork --pid-file={at}/pid -t -k {at}/nbd -x vda");
        say(dir, "qemu-nbd", &format!("{common} {arguments}"));
        let pid = fs::read_to_string(dir.join("pid")).unwrap();
        Self(Process::now(pid.trim().parse().unwrap()).unwrap())
    }

    fn kill(&self) {
        self.0.kill().unwrap();
        self.0.wait_exited(Duration::from_secs(30)).unwrap();
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A client that knows how many of its requests are unanswered.
struct Writing {
    client: Client<()>,
    outcomes: Receiver<Outcome>,
    unanswered: Cell<usize>,
    failed: Cell<usize>,
}

impl Writing {
    fn connect(socket: &Path) -> Self {
        let (report, outcomes) = channel();
        let client = Client::connect(socket, "vda", &Settings::default(), move |(), outcome| {
            let _ = report.send(outcome);
        });
        let (unanswered, failed) = (Cell::new(0), Cell::new(0));
        Self { client: client.unwrap(), outcomes, unanswered, failed }
    }

    fn write(&self, at: usize, data: &[u8]) -> Result<(), ClientError> {
        self.client.write(at as u64, data, ())?;
        self.unanswered.update(|unanswered| unanswered + 1);
        Ok(())
    }

    fn write_zeroes(&self, at: usize, bytes: usize) {
        self.client.write_zeroes(at as u64, bytes as u64, ()).unwrap();
        self.unanswered.update(|unanswered| unanswered + 1);
    }

    /// Waits for all answers, and then until the server has made all durable.
    fn sync(&self) -> Outcome {
        self.wait();
        match self.client.flush(()) {
            Ok(()) => self.unanswered.set(1),
            Err(ClientError::Failed(failure)) => return Err(failure),
            Err(error) => panic!("{error}"),
        }
        self.wait();
        self.client.failure().map_or(Ok(()), Err)
    }

    fn wait(&self) {
        for _ in 0..self.unanswered.take() {
            let failed = self.outcomes.recv().unwrap().is_err();
            self.failed.update(|all| all + usize::from(failed));
        }
    }
}

/// Writes data and zeroes of many kinds, and returns the disk's expected content.
fn fill(writing: &Writing) -> Vec<u8> {
    let mut content = vec![0; DISK];
    for at in [0, 5 * MIB, 40 * MIB + 512, 63 * MIB] {
        let data = noise(at as u64, MIB);
        for (number, piece) in data.chunks(70_000).enumerate() {
            writing.write(at + number * 70_000, piece).unwrap();
        }
        content[at..at + MIB].copy_from_slice(&data);
    }
    writing.sync().unwrap();
    writing.write_zeroes(5 * MIB, 512 << 10);
    content[5 * MIB..5 * MIB + (512 << 10)].fill(0);
    // A large range that is a hole already, and an unaligned one.
    writing.write_zeroes(10 * MIB, 29 * MIB);
    writing.write_zeroes(63 * MIB + 1000, 5000);
    content[63 * MIB + 1000..63 * MIB + 6000].fill(0);
    writing.sync().unwrap();
    content
}

/// Checks that the image has this content, and allocates little more than what isn't zero.
fn check(dir: &Path, format: &str, content: &[u8]) {
    say(dir, "qemu-img", &format!("convert -f {format} -O raw image back"));
    assert!(fs::read(dir.join("back")).unwrap() == content, "{format}");
    let taken = fs::metadata(dir.join("image")).unwrap().blocks() * 512;
    assert!(taken < 5 * MIB as u64, "{format}: {taken} bytes taken");
    let map = say(dir, "qemu-img", &format!("map -f {format} --output json image"));
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let data: u64 = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|extent| extent["data"] == true)
        .map(|extent| extent["length"].as_u64().unwrap())
        .sum();
    assert!(data < 5 * MIB as u64, "{format}: {data} bytes of data");
}

#[test]
fn qemu_nbd_gets_the_bytes_and_keeps_the_holes() {
    for format in ["raw", "qcow2"] {
        let dir = tempdir().unwrap();
        say(dir.path(), "qemu-img", &format!("create -f {format} image {DISK}"));
        let nbd = Nbd::start(dir.path(), &format!("-f {format} --discard=unmap image"));
        let writing = Writing::connect(&dir.path().join("nbd"));
        let info = writing.client.info();
        assert_eq!(info.bytes, DISK as u64);
        assert_eq!((info.sizes.minimum, info.sizes.maximum), (1, 32 << 20));
        let content = fill(&writing);
        drop(writing);
        nbd.kill();
        check(dir.path(), format, &content);
    }
}

#[test]
fn a_waiting_vm_gets_its_disk() {
    for format in ["raw", "qcow2"] {
        let dir = tempdir().unwrap();
        say(dir.path(), "qemu-img", &format!("create -f {format} image {DISK}"));
        let vm = Vm::start(dir.path(), "image", format, true);
        let socket = dir.path().join("nbd");
        vm.export(&socket, "vda");
        let writing = Writing::connect(&socket);
        let content = fill(&writing);
        drop(writing);
        vm.stop_export();
        vm.quit();
        check(dir.path(), format, &content);
    }
}

#[test]
fn a_full_filesystem_is_reported_clearly() {
    let dir = tempdir().unwrap();
    say(dir.path(), "qemu-img", &format!("create -f raw image {DISK}"));
    let full = "driver=raw,file.driver=blkdebug,file.image.driver=file,\
                file.image.filename=image,file.inject-error.0.event=pwritev,\
                file.inject-error.0.iotype=write,file.inject-error.0.errno=28,\
                file.inject-error.0.sector=2048";
    let nbd = Nbd::start(dir.path(), &format!("--image-opts {full}"));
    let writing = Writing::connect(&dir.path().join("nbd"));
    for number in 0..4 {
        writing.write(number * MIB, &[1; 4096]).unwrap();
    }
    let failure = writing.sync().unwrap_err();
    assert!(matches!(failure, Failure::Disk { offset: 0x10_0000, errno: Errno::NO_SPACE, .. }));
    let text = "the destination's disk did not write 4096 bytes at 1048576: no space left";
    assert_eq!(failure.to_string(), text);
    assert_eq!(writing.failed.get(), 1);
    drop((writing, nbd));
}

#[test]
fn read_only_and_missing_exports_are_refused() {
    let dir = tempdir().unwrap();
    say(dir.path(), "qemu-img", "create -f raw image 1M");
    let nbd = Nbd::start(dir.path(), "-f raw -r image");
    let connect =
        |name| Client::connect(&dir.path().join("nbd"), name, &Settings::default(), |(), _| {});
    let refused = connect("vda").unwrap_err();
    assert_eq!(refused.to_string(), "the NBD export 'vda' is read-only");
    assert!(matches!(connect("nosuch"), Err(ClientError::Refused { .. })));
    drop(nbd);
}

#[test]
fn a_server_that_is_killed_fails_what_is_unanswered() {
    let dir = tempdir().unwrap();
    say(dir.path(), "qemu-img", &format!("create -f raw image {DISK}"));
    let nbd = Nbd::start(dir.path(), "-f raw image");
    let writing = Writing::connect(&dir.path().join("nbd"));
    writing.write(0, &[1; 4096]).unwrap();
    writing.sync().unwrap();
    nbd.kill();
    let refused = loop {
        if let Err(error) = writing.write(0, &[1; MIB]) {
            break error;
        }
    };
    assert!(matches!(refused, ClientError::Failed(Failure::Broken(_))), "{refused}");
    assert!(writing.sync().is_err());
}
