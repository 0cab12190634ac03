//! A storage host with a VM's disk, which both hosts reach by a network of its own. Each host's
//! link to it is shaped and counted apart from all others.
//!
//! The disk is an NBD export of a file in the storage host's memory, so that measurements show the
//! network and not a disk of this machine, or a file that an NFS server has there. The file is
//! removed with the host.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::host::{Host, RUN_DIR};
use super::link::shape;
use super::{Hosts, counters};
use crate::error::{LabError, Result, SystemContext};
use crate::program;
use crate::setup::Nfs;

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 10);
const PORT: u16 = 10809;
const BRIDGE: &str = "storage";
/// Name of each host's link.
const NIC: &str = "san";
const TO_A: &str = "to-a";
const TO_B: &str = "to-b";
const EXPORT: &str = "data";
const IMAGE: &str = "data.img";
/// Name of the disk in QEMU and in guests.
const NODE: &str = "data";
/// What a slow disk reads in one go.
const SEEK_BYTES: u32 = 128 << 10;
/// More than two QEMUs and an agent that reads.
const CLIENTS_MAX: &str = "16";
/// The NFS server, until it is killed.
const SERVE_NFS: &str = include_str!("nfs.sh");
/// Where it has the images, for its clients.
const NFS_DIR: &str = "/mnt";
/// Where its log is, in the storage host's own directory.
const NFS_LOG: &str = "ganesha.log";
/// Longest time until it serves.
const SERVED_MAX: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(200);

/// The storage host. Dropping it removes it with its content.
#[derive(Debug)]
pub struct Storage {
    host: Host,
    a: String,
    b: String,
}

/// A running NFS server. Dropping it ends it.
#[derive(Debug)]
pub struct NfsServer(Child);

impl Drop for NfsServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Storage {
    /// Makes the host, and joins both hosts to it by links that have no limit until they are
    /// shaped.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn join(hosts: &Hosts) -> Result<Self> {
        let name = format!("{}s", hosts.a.name.trim_end_matches('a'));
        let host = Host::new(&name, vec![IpAddr::V4(SERVER)], false)?;
        host.ip(&["link", "add", BRIDGE, "type", "bridge", "stp_state", "0"])?;
        host.ip(&["addr", "add", &format!("{SERVER}/24"), "dev", BRIDGE])?;
        host.ip(&["link", "set", BRIDGE, "up"])?;
        for (nth, (client, port)) in [(&hosts.a, TO_A), (&hosts.b, TO_B)].into_iter().enumerate() {
            program::output(program::command("ip").args([
                "link",
                "add",
                NIC,
                "netns",
                &client.name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                &name,
            ]))?;
            host.ip(&["link", "set", port, "master", BRIDGE, "up"])?;
            let address = format!("10.79.0.{}/24", nth + 1);
            client.ip(&["addr", "add", &address, "dev", NIC])?;
            client.ip(&["link", "set", NIC, "up"])?;
        }
        Ok(Self { host, a: hosts.a.name.clone(), b: hosts.b.name.clone() })
    }

    /// Serves a copy of an image, which any client may read and write; with `requests_per_s` as
    /// a disk that seeks for each request, and again for each 128 KiB of it.
    ///
    /// # Errors
    /// If there is no room for it, or `qemu-nbd` fails.
    pub fn serve(&self, image: &Path, requests_per_s: Option<u32>) -> Result<()> {
        let copy = format!("{RUN_DIR}/{IMAGE}");
        self.make_room()?;
        self.keep(image, &copy)?;
        let limit = requests_per_s.map(|requests| {
            format!("throttle-group,id=seeks,x-iops-total={requests},x-iops-size={SEEK_BYTES}")
        });
        let slow = format!(
            "driver=throttle,throttle-group=seeks,file.driver=raw,file.file.driver=file,\
             file.file.filename={copy}"
        );
        let what = match &limit {
            Some(limit) => vec!["--object", limit.as_str(), "--image-opts", slow.as_str()],
            None => vec!["--format", "raw", copy.as_str()],
        };
        self.start_nbd(0, EXPORT, &what)
    }

    /// Serves an image where it is, in any format, as the export of this number, which any client
    /// may read and write.
    ///
    /// # Errors
    /// If `qemu-nbd` fails.
    pub fn export(&self, number: u16, image: &Path, format: &str) -> Result<()> {
        let image = image.display().to_string();
        self.start_nbd(number, &export_name(number), &["--format", format, &image])
    }

    /// The options of QEMU's node for that export, each after `prefix`.
    #[must_use]
    pub fn export_options(number: u16, prefix: &str) -> String {
        let (port, name) = (PORT + number, export_name(number));
        let options = [
            "driver=nbd".to_owned(),
            "server.type=inet".to_owned(),
            format!("server.host={SERVER}"),
            format!("server.port={port}"),
            format!("export={name}"),
        ];
        options.map(|option| format!("{prefix}{option}")).join(",")
    }

    fn start_nbd(&self, number: u16, name: &str, what: &[&str]) -> Result<()> {
        let (address, port) = (SERVER.to_string(), (PORT + number).to_string());
        let place = ["--bind", &address, "--port", &port, "--export-name", name];
        let how = ["--cache", "unsafe", "--discard", "unmap", "--fork"];
        let whom = ["--shared", CLIENTS_MAX, "--persistent"];
        self.run("qemu-nbd", &[&place[..], &how[..], &whom[..], what].concat()).map(drop)
    }

    /// Serves copies of images by NFS, under their own names, which any client may read and write.
    ///
    /// # Errors
    /// If there is no room for them, or the server doesn't serve.
    pub fn serve_nfs(&self, nfs: &Nfs, images: &[PathBuf]) -> Result<NfsServer> {
        self.make_room()?;
        for image in images {
            self.keep(image, &format!("{RUN_DIR}/{}", file_name(image)))?;
        }
        let mut serve = self.host.command("unshare");
        serve.args(["--mount", "sh", "-c", SERVE_NFS, "sh", RUN_DIR]);
        serve.args([&nfs.home, &nfs.rpcbind, &nfs.ganesha, &nfs.modules]);
        serve.env("LD_LIBRARY_PATH", &nfs.libraries).stdin(Stdio::null()).stdout(Stdio::null());
        let server = NfsServer(serve.spawn().doing("start an NFS server")?);
        let until = Instant::now() + SERVED_MAX;
        for image in images {
            // As its clients reach it: it listens before it is known which ports it has.
            let image = Self::nfs_node(&file_name(image));
            let look = || self.run("qemu-img", &["info", &format!("json:{image}")]);
            while let Err(error) = look() {
                if Instant::now() > until {
                    let log = std::fs::read_to_string(self.host.inside(NFS_LOG));
                    let detail = format!("{error}; {}", log.unwrap_or_default());
                    let what = "the NFS server".to_owned();
                    return Err(LabError::Silent { what, waited: SERVED_MAX, detail });
                }
                std::thread::sleep(LOOK);
            }
        }
        Ok(server)
    }

    /// An image that is served by NFS, in the form of QEMU's options.
    #[must_use]
    pub fn nfs_node(name: &str) -> Value {
        let server = json!({ "type": "inet", "host": SERVER.to_string() });
        json!({ "driver": "nfs", "server": server, "path": format!("{NFS_DIR}/{name}") })
    }

    /// A directory in memory for the images.
    fn make_room(&self) -> Result<()> {
        self.run("mount", &["-t", "tmpfs", "-o", "size=75%", "storage", RUN_DIR]).map(drop)
    }

    fn keep(&self, image: &Path, copy: &str) -> Result<()> {
        self.run("cp", &["--sparse=always", &image.display().to_string(), copy]).map(drop)
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let missing = || LabError::Missing { what: program.to_owned() };
        let found = program::find(program).ok_or_else(missing)?;
        program::output(self.host.command(found).args(arguments))
    }

    /// QEMU's arguments for the disk, the same on both hosts. In JSON, as managers write them: so
    /// agents read them of VMs that they carry.
    #[must_use]
    pub fn arguments() -> Vec<String> {
        let server =
            json!({ "type": "inet", "host": SERVER.to_string(), "port": PORT.to_string() });
        disk(json!({ "driver": "nbd", "server": server, "export": EXPORT }))
    }

    /// The same for an image of this name that is served by NFS.
    #[must_use]
    pub fn nfs_arguments(name: &str) -> Vec<String> {
        disk(Self::nfs_node(name))
    }

    /// Sets the rate of both hosts' links, each way.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn shape(&self, mbit: u32) -> Result<()> {
        for (client, port) in [(&self.a, TO_A), (&self.b, TO_B)] {
            shape(&self.host.name, port, mbit)?;
            shape(client, NIC, mbit)?;
        }
        Ok(())
    }

    /// Bytes that have crossed host b's link since it was first shaped, both ways.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn crossed_at_b(&self) -> Result<u64> {
        let ends = [(&self.host.name, TO_B), (&self.b, NIC)];
        ends.into_iter().try_fold(0, |sum, (namespace, nic)| {
            Ok(sum + counters::shaped(namespace)?.get(nic).copied().unwrap_or(0))
        })
    }
}

/// QEMU's arguments for a disk whose image is this node.
fn disk(mut image: Value) -> Vec<String> {
    let (below, cache) = (format!("{NODE}-image"), json!({ "direct": true }));
    image["node-name"] = below.as_str().into();
    image["cache"] = cache.clone();
    image["discard"] = "unmap".into();
    let raw = json!({ "driver": "raw", "node-name": NODE, "file": below, "cache": cache,
        "discard": "unmap" });
    let [image, raw] = [image, raw].map(|node| node.to_string());
    let device = format!("virtio-blk-pci,drive={NODE},id={NODE}-disk,serial={NODE}");
    ["-blockdev", &image, "-blockdev", &raw, "-device", &device].map(str::to_owned).to_vec()
}

fn export_name(number: u16) -> String {
    format!("disk{number}")
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
