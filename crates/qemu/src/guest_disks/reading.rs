//! How the content of a tree of block nodes can be read without its QEMU.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::graph::{Graph, Node};
use super::services::{nbd, nfs, number};
use crate::disks::NETWORK;

/// A tree of more nodes is a loop.
const NODES_MAX: usize = 200;

/// Drivers whose nodes read the same as the node below.
const FILTERS: [&str; 4] = ["throttle", "copy-on-read", "compress", "preallocate"];

/// How file names start that only QEMU's process can use.
const HANDED_OVER: [&str; 3] = ["/proc/", "/dev/fd/", "/dev/fdset/"];

/// Options of a protocol that refer to what only its QEMU has: keys and certificates.
const SECRETS: [&str; 6] = [
    "key-secret",
    "password-secret",
    "cookie-secret",
    "proxy-password-secret",
    "tls-creds",
    "secret",
];

/// How a disk's content can be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reading {
    /// A file or a block device holds it unchanged, from an offset on.
    Direct {
        /// Its absolute path.
        path: PathBuf,
        /// The disk's first byte in it.
        offset: u64,
    },
    /// An NBD export holds it unchanged, from an offset on.
    Nbd {
        /// The server.
        server: NbdServer,
        /// The export's name.
        export: String,
        /// The disk's first byte in it.
        offset: u64,
    },
    /// It is in a format, or behind a protocol, that QEMU's own tools can read.
    ByQemuNbd {
        /// The image with all that belongs to it, in the form of QEMU's options; nothing
        /// is opened for writing, and nothing is locked.
        image: Value,
    },
    /// Only its QEMU can read it.
    No {
        /// Why not.
        reason: String,
    },
}

impl Reading {
    /// The files of this host that are read.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        match self {
            Self::Direct { path, .. } => files.push(path.clone()),
            Self::ByQemuNbd { image } => named(image, &mut files, 0),
            Self::Nbd { .. } | Self::No { .. } => {}
        }
        files
    }
}

fn named(image: &Value, files: &mut Vec<PathBuf>, depth: usize) {
    let Some(options) = image.as_object().filter(|_| depth < NODES_MAX) else { return };
    for (key, value) in options {
        match value.as_str().filter(|_| key == "filename") {
            Some(file) => files.push(file.into()),
            None => named(value, files, depth + 1),
        }
    }
}

/// An NBD server, as QEMU reaches it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NbdServer {
    /// At a socket of QEMU's host.
    Unix(PathBuf),
    /// At `HOST:PORT`.
    Tcp(String),
}

/// The image below the topmost node, as QEMU names it.
pub(super) fn file(graph: &Graph<'_>, root: &Node<'_>) -> String {
    let mut node = root;
    for _ in 0..NODES_MAX {
        let Some(child) = graph.child(node, "file") else { break };
        node = child;
    }
    filename(node).unwrap_or_else(|| node.file.to_owned())
}

/// How what is below the topmost node can be read.
pub(super) fn of(graph: &Graph<'_>, root: &Node<'_>, cwd: &Path) -> Reading {
    let walk = Walk { graph, cwd, seen: Cell::new(0) };
    let reading = walk.describe(root).and_then(Described::reading);
    reading.unwrap_or_else(|reason| Reading::No { reason })
}

/// A node as its QEMU has it, for another reader.
enum Described {
    /// Unchanged bytes, from an offset on, of what the protocol's options name.
    Plain { protocol: Map<String, Value>, offset: u64, cut: Option<u64> },
    /// Anything else.
    Other(Map<String, Value>),
}

impl Described {
    /// The options in QEMU's form.
    fn options(self) -> Value {
        match self {
            Self::Plain { protocol, offset: 0, cut: None } => Value::Object(protocol),
            Self::Plain { protocol, offset, cut } => {
                let mut raw = json!({ "driver": "raw", "offset": offset, "file": protocol });
                if let Some(bytes) = cut {
                    raw["size"] = bytes.into();
                }
                raw
            }
            Self::Other(options) => Value::Object(options),
        }
    }

    fn reading(self) -> Result<Reading, String> {
        if let Self::Plain { protocol, offset, .. } = &self {
            let text = |name: &str| protocol.get(name).and_then(Value::as_str);
            match text("driver") {
                Some("file" | "host_device") => {
                    let path = text("filename").unwrap_or_default().into();
                    return Ok(Reading::Direct { path, offset: *offset });
                }
                Some("nbd") => {
                    let server = protocol.get("server").and_then(server).ok_or("no NBD server")?;
                    let export = text("export").unwrap_or_default().to_owned();
                    return Ok(Reading::Nbd { server, export, offset: *offset });
                }
                _ => {}
            }
        }
        let mut image = self.options();
        image["read-only"] = true.into();
        image["force-share"] = true.into();
        Ok(Reading::ByQemuNbd { image })
    }
}

struct Walk<'g, 'a> {
    graph: &'g Graph<'a>,
    cwd: &'g Path,
    /// How many nodes it has visited.
    seen: Cell<usize>,
}

impl<'g, 'a> Walk<'g, 'a> {
    fn below(&self, node: &Node<'a>, role: &str) -> Result<Described, String> {
        let below = self.graph.child(node, role);
        let below =
            below.ok_or_else(|| format!("QEMU doesn't report what is below {}", node.name))?;
        self.describe(below)
    }

    fn describe(&self, node: &'g Node<'a>) -> Result<Described, String> {
        self.seen.set(self.seen.get() + 1);
        if self.seen.get() > NODES_MAX {
            return Err("its images have no end".to_owned());
        }
        if let Some(job) = node.jobs.first() {
            return Err(format!("the job `{job}` works on it"));
        }
        if node.encrypted || node.driver == "luks" {
            return Err("its image is encrypted, and the key is QEMU's alone".to_owned());
        }
        match node.driver {
            filter if FILTERS.contains(&filter) => self.below(node, "file"),
            "raw" => self.raw(node),
            "qcow2" => self.qcow2(node),
            "file" | "host_device" | "nbd" => self.plain(node),
            other if NETWORK.contains(&other) => self.plain(node),
            other => Err(format!("what is in `{other}` can be read by its QEMU alone")),
        }
    }

    /// A part of the node below, or all of it.
    fn raw(&self, node: &Node<'a>) -> Result<Described, String> {
        let own = described(node)?;
        let number = |name: &str| own.get(name).map_or(Ok(None), |value| number(value).map(Some));
        let more = number("offset")?.unwrap_or(0);
        let cut = number("size")?;
        match self.below(node, "file")? {
            Described::Plain { protocol, offset, cut: below } => {
                let offset = offset.checked_add(more).ok_or("its image has no start")?;
                let rest = below.map(|bytes| bytes.saturating_sub(more));
                Ok(Described::Plain { protocol, offset, cut: cut.or(rest) })
            }
            other if more == 0 && cut.is_none() => Ok(other),
            Described::Other(below) => {
                let mut options = Map::new();
                options.insert("driver".to_owned(), "raw".into());
                options.insert("offset".to_owned(), more.into());
                options.extend(cut.map(|bytes| ("size".to_owned(), bytes.into())));
                options.insert("file".to_owned(), Value::Object(below));
                Ok(Described::Other(options))
            }
        }
    }

    fn qcow2(&self, node: &Node<'a>) -> Result<Described, String> {
        let mut options = Map::new();
        options.insert("driver".to_owned(), "qcow2".into());
        options.insert("file".to_owned(), self.below(node, "file")?.options());
        // Overrides the backing file in the image's own header.
        options.insert("backing".to_owned(), Value::Null);
        for role in ["backing", "data-file"] {
            if node.children.contains_key(role) {
                options.insert(role.to_owned(), self.below(node, role)?.options());
            }
        }
        Ok(Described::Other(options))
    }

    /// A protocol with the options that name the image, without those that tune it.
    fn plain(&self, node: &Node<'a>) -> Result<Described, String> {
        let mut protocol = described(node)?;
        if let Some(secret) = SECRETS.iter().find(|secret| protocol.contains_key(**secret)) {
            return Err(format!("its image is reached with a `{secret}` that is QEMU's alone"));
        }
        match node.driver {
            "file" | "host_device" => {
                let named = filename(node).ok_or("QEMU doesn't name its image")?;
                if HANDED_OVER.iter().any(|place| named.starts_with(place)) {
                    return Err(format!("QEMU was handed its image as an open file ({named})"));
                }
                let path = self.cwd.join(named).into_os_string().into_string();
                let path = path.map_err(|_| "its image's name is not UTF-8".to_owned())?;
                protocol = Map::from_iter([("filename".to_owned(), path.into())]);
            }
            "nbd" => {
                let found = nbd(node, &protocol).ok_or_else(|| {
                    format!("its NBD server is not to be read from `{}`", node.file)
                })?;
                protocol = found;
            }
            "nfs" => {
                let found = nfs(node, &protocol).ok_or_else(|| {
                    format!("its NFS server is not to be read from `{}`", node.file)
                })?;
                protocol = found;
            }
            _ if protocol.is_empty() => {
                protocol.insert("filename".to_owned(), node.file.into());
            }
            _ => {}
        }
        protocol.insert("driver".to_owned(), node.driver.into());
        Ok(Described::Plain { protocol, offset: 0, cut: None })
    }
}

/// The options that QEMU describes in JSON, if it has no plain name for the node; else
/// empty. QEMU cuts a description that is longer than a path.
fn described(node: &Node<'_>) -> Result<Map<String, Value>, String> {
    let Some(json) = node.file.strip_prefix("json:") else { return Ok(Map::new()) };
    serde_json::from_str(json).map_err(|_| format!("QEMU describes {} incompletely", node.name))
}

/// The file name of a protocol's node.
fn filename(node: &Node<'_>) -> Option<String> {
    if !node.file.starts_with("json:") {
        return Some(node.file.to_owned()).filter(|name| !name.is_empty());
    }
    Some(described(node).ok()?.get("filename")?.as_str()?.to_owned())
}

fn server(options: &Value) -> Option<NbdServer> {
    let text = |name: &str| options[name].as_str().filter(|text| !text.is_empty());
    if let Some(path) = text("path") {
        return Some(NbdServer::Unix(path.into()));
    }
    let (host, port) = (text("host")?, text("port")?);
    let is_v6 = host.contains(':');
    Some(NbdServer::Tcp(if is_v6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") }))
}
