use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use host::rights;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use storage::{Failure, Image, Layer, OpenError, Opening, Reader, Settings, open};
use test_scope::TestDir;

use crate::{Got, noise, wanted};

const MIB: usize = 1 << 20;

fn say(dir: &Path, program: &str, arguments: &str) {
    let output =
        Command::new(program).args(arguments.split(' ')).current_dir(dir).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {words}");
}

fn image(path: &Path, format: &str) -> Image {
    Image::Format(Layer::alone(path.to_owned(), format))
}

/// A qcow2 image over another image.
fn over(path: &Path, (base, format): (&Path, &str)) -> Image {
    let backing = Some(Box::new(Layer::alone(base.to_owned(), format)));
    Image::Format(Layer { backing, ..Layer::alone(path.to_owned(), "qcow2") })
}

/// The processes whose command line names something in this directory.
fn serving(dir: &Path) -> Vec<Pid> {
    let name = dir.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let entry = entry.ok()?;
        let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).into_owned();
        (line.starts_with("qemu-nbd") && line.contains(name)).then_some(pid)
    });
    processes.collect()
}

/// Checks that a reader has left nothing: no process, and no new file.
fn nothing_left(dir: &Path, files: usize) {
    assert_eq!(serving(dir), []);
    assert_eq!(fs::read_dir(dir).unwrap().count(), files);
}

#[test]
fn any_format_is_read_and_nothing_is_left_behind() {
    let dir = TestDir::new();
    let at = dir.path();
    let mut content = noise(1, 24 * MIB + 512);
    content[3 * MIB..9 * MIB].fill(0);
    fs::write(at.join("plain,raw"), &content).unwrap();
    say(at, "qemu-img", "convert -f raw -O qcow2 plain,raw base.qcow2");
    say(at, "qemu-img", "create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2");
    // Data in the overlay where its backing file has a hole.
    let write = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", "write -P 7 5M 1M", "top.qcow2"])
        .current_dir(at)
        .output();
    assert!(write.unwrap().status.success());
    // What the header names is another one.
    say(at, "qemu-img", "rebase -u -f qcow2 -b nosuch -F qcow2 top.qcow2");
    let base = at.join("base.qcow2");
    for (name, image) in [
        ("plain,raw", image(&at.join("plain,raw"), "raw")),
        ("base.qcow2", image(&base, "qcow2")),
        ("top.qcow2", over(&at.join("top.qcow2"), (&base, "qcow2"))),
    ] {
        if name == "top.qcow2" {
            content[5 * MIB..6 * MIB].fill(7);
        }
        let opened = open(&image, &Opening::new(at)).unwrap();
        assert_eq!(opened.source.bytes(), content.len() as u64);
        let got = Got::new();
        let reader = Reader::start(opened.source, got.clone(), Settings::default()).unwrap();
        let items = wanted(content.len());
        for batch in items.chunks(100) {
            reader.add(batch).unwrap();
        }
        reader.wait_idle().unwrap();
        got.check(&items, &content);
        assert_eq!(serving(at).len(), 1, "it serves for as long as we read");
        let progress = reader.finish();
        assert_eq!(progress.read_pages, items.len() as u64);
        nothing_left(at, 3);
    }
}

/// An image's maker can name any file or server in its header.
#[test]
fn what_a_header_names_is_not_opened() {
    let dir = TestDir::new();
    let at = dir.path();
    fs::write(at.join("base"), noise(5, MIB)).unwrap();
    let nbd = r#"json:{"driver":"nbd","server":{"type":"unix","path":"/nosuch"}}"#;
    say(at, "qemu-img", &format!("create -q -u -f qcow2 -b {nbd} -F raw top.qcow2 1M"));
    let read = |image: &Image| {
        let source = open(image, &Opening::new(at)).unwrap().source;
        let got = Got::new();
        let reader = Reader::start(source, got.clone(), Settings::default()).unwrap();
        reader.add(&wanted(MIB)).unwrap();
        reader.wait_idle().unwrap();
        got
    };
    read(&image(&at.join("top.qcow2"), "qcow2")).check(&wanted(MIB), &vec![0; MIB]);
    let over = over(&at.join("top.qcow2"), (&at.join("base"), "raw"));
    read(&over).check(&wanted(MIB), &noise(5, MIB));
    nothing_left(at, 2);
}

/// An image that a peer has chosen may have any backing file.
#[test]
fn backing_files_are_opened_with_the_user_s_rights() {
    if !rustix::process::geteuid().is_root() {
        // Only root has rights to give up.
        return;
    }
    let dir = TestDir::new();
    let at = dir.path();
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(at, 0o755);
    fs::write(at.join("secret"), noise(3, MIB)).unwrap();
    mode(&at.join("secret"), 0o600);
    say(at, "qemu-img", "create -q -f qcow2 -b secret -F raw top.qcow2");
    let top = over(&at.join("top.qcow2"), (&at.join("secret"), "raw"));
    let user = rights::User { uid: 65534, gid: 65534, groups: vec![65534] };
    let how = Opening { user: Some(user), ..Opening::new(at) };
    let refused = |image: &Image| open(image, &how).unwrap_err().to_string();
    let text = refused(&top);
    assert!(text.contains("secret") && text.contains("Permission denied"), "{text}");
    let text = refused(&Image::Raw { path: at.join("secret"), base: 0, bytes: None });
    assert!(text.contains("Permission denied"), "{text}");
    assert!(open(&top, &Opening::new(at)).is_ok());

    mode(&at.join("secret"), 0o644);
    let opened = open(&top, &how).unwrap();
    let served = serving(at);
    let status = fs::read_to_string(format!("/proc/{}/status", served[0])).unwrap();
    assert!(status.contains("Uid:\t65534\t65534\t65534\t65534\n"), "{status}");
    drop(opened);
    nothing_left(at, 2);
}

#[test]
fn a_missing_program_is_reported_clearly() {
    let dir = TestDir::new();
    let path = dir.path().join("image");
    fs::write(&path, [0; 4096]).unwrap();
    let how = Opening { qemu_nbd: "/nosuch/qemu-nbd".into(), ..Opening::new(dir.path()) };
    let refused = open(&image(&path, "raw"), &how).unwrap_err();
    assert!(matches!(refused, OpenError::Program(_)), "{refused:?}");
    assert!(refused.to_string().contains("is it installed"), "{refused}");
    nothing_left(dir.path(), 1);
}

#[test]
fn an_image_that_is_not_what_it_should_be_is_refused_in_the_programs_words() {
    let dir = TestDir::new();
    let path = dir.path().join("image");
    fs::write(&path, noise(2, 1 << 16)).unwrap();
    let refused = |path: &Path, format| {
        open(&image(path, format), &Opening::new(dir.path())).unwrap_err().to_string()
    };
    let text = refused(&path, "qcow2");
    assert!(text.contains("not in qcow2 format"), "{text}");
    let text = refused(&path, "nosuch");
    assert!(text.contains("nosuch"), "{text}");
    let text = refused(&dir.path().join("nosuch"), "qcow2");
    assert!(text.contains("No such file"), "{text}");
    nothing_left(dir.path(), 1);
}

#[test]
fn an_image_that_a_vm_has_locked_is_read() {
    let dir = TestDir::new();
    let at = dir.path();
    let content = noise(3, 4 * MIB);
    fs::write(at.join("plain"), &content).unwrap();
    say(at, "qemu-img", "convert -f raw -O qcow2 plain image");
    // It may write, so it locks the image.
    let log = fs::File::create(at.join("log")).unwrap();
    let mut holder = Command::new("qemu-nbd")
        .args(["-t", "-f", "qcow2", "-k"])
        .args([at.join("socket"), at.join("image")])
        .arg("--pid-file")
        .arg(at.join("pid"))
        .arg("--fork")
        .stdin(Stdio::null())
        .stdout(log)
        .spawn()
        .unwrap();
    assert!(holder.wait().unwrap().success());
    let pid = fs::read_to_string(at.join("pid")).unwrap();
    let source = open(&image(&at.join("image"), "qcow2"), &Opening::new(at)).unwrap().source;
    let got = Got::new();
    let reader = Reader::start(source, got.clone(), Settings::default()).unwrap();
    let items = wanted(4 * MIB);
    reader.add(&items).unwrap();
    reader.wait_idle().unwrap();
    got.check(&items, &content);
    drop(reader);
    let holder = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    assert_eq!(serving(at), [holder], "only the one that holds it");
    kill_process(holder, Signal::KILL).unwrap();
}

/// Sends a signal to a reader's `qemu-nbd` in the middle. Returns the failure, and how many
/// threads are left behind.
fn signalled(signal: Signal) -> (Failure, usize) {
    let dir = TestDir::new();
    let path = dir.path().join("image");
    fs::write(&path, noise(4, 4 * MIB)).unwrap();
    let source = open(&image(&path, "raw"), &Opening::new(dir.path())).unwrap().source;
    let got = Got::new();
    let settings = Settings { patience: std::time::Duration::from_secs(2), ..Settings::default() };
    let reader = Reader::start(source, got.clone(), settings).unwrap();
    let items = wanted(4 * MIB);
    reader.add(&items[..100]).unwrap();
    reader.wait_idle().unwrap();
    let [server] = serving(dir.path())[..] else { panic!("one server") };
    kill_process(server, signal).unwrap();
    let _ = reader.add(&items[100..]);
    let why = reader.wait_idle().unwrap_err();
    assert!(got.pages.lock().unwrap().len() >= 100);
    let progress = reader.finish();
    nothing_left(dir.path(), 1);
    (why, progress.abandoned_threads)
}

#[test]
fn a_killed_server_ends_the_reader() {
    let (why, abandoned) = signalled(Signal::KILL);
    assert!(matches!(why, Failure::Broken(_)), "{why}");
    assert_eq!(abandoned, 0);
}

#[test]
fn a_stopped_server_ends_the_reader_and_keeps_no_thread() {
    let (why, abandoned) = signalled(Signal::STOP);
    assert!(matches!(why, Failure::Stalled(_)), "{why}");
    assert_eq!(abandoned, 0);
}

/// The environment variable with the image that another process of this test holds open.
const HOLD: &str = "DROVEWAY_TEST_HOLD";
const READY: &str = "it is open";

/// Not a test by itself: the next test starts it in a process, and kills that.
#[test]
fn held() {
    let Some(path) = env::var_os(HOLD).map(PathBuf::from) else { return };
    let how = Opening::new(path.parent().unwrap());
    let opened = open(&image(&path, "raw"), &how).unwrap();
    println!("{READY}");
    let _ = io::stdin().lock().read_line(&mut String::new());
    drop(opened);
}

#[test]
fn a_server_ends_with_the_process_that_started_it() {
    let dir = TestDir::new();
    let path = dir.path().join("image");
    fs::write(&path, [7; 4096]).unwrap();
    let mut holder = Command::new(env::current_exe().unwrap())
        .args(["--exact", "formats::held", "--nocapture"])
        .env(HOLD, &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut words = BufReader::new(holder.stdout.take().unwrap()).lines();
    assert!(words.any(|line| line.unwrap().contains(READY)));
    let [server] = serving(dir.path())[..] else { panic!("one server") };
    let server = pidfd_open(server, PidfdFlags::empty()).unwrap();
    holder.kill().unwrap();
    holder.wait().unwrap();
    let patience = Timespec { tv_sec: 30, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&server, PollFlags::IN)], Some(&patience)), Ok(1));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "and leaves no file");
}
