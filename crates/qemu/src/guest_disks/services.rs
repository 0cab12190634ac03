//! The server of a storage service that a node is read from, and the export or file there: QEMU
//! names some by a URL, and describes others in JSON.

use serde_json::{Map, Value, json};

use super::graph::Node;

/// An NBD node's server and export: from a description in JSON, or from
/// `nbd://HOST:PORT/EXPORT` or `nbd+unix:///EXPORT?socket=PATH`, in which QEMU
/// escapes nothing.
pub(super) fn nbd(node: &Node<'_>, options: &Map<String, Value>) -> Option<Map<String, Value>> {
    let (server, export) = if node.file.starts_with("json:") {
        let dotted = |name: &str| options.get(&format!("server.{name}"));
        let one = |name: &str| options.get("server").and_then(|server| server.get(name));
        let text = |name: &str| dotted(name).or_else(|| one(name))?.as_str();
        let server = match text("type")? {
            "inet" => inet(text("host")?, text("port")?),
            "unix" => json!({ "type": "unix", "path": text("path")? }),
            _ => return None,
        };
        (server, options.get("export").and_then(Value::as_str).unwrap_or_default())
    } else if let Some(rest) = node.file.strip_prefix("nbd+unix://") {
        let (export, path) = rest.rsplit_once("?socket=")?;
        (json!({ "type": "unix", "path": path }), export.strip_prefix('/').unwrap_or(export))
    } else {
        let rest = node.file.strip_prefix("nbd://")?;
        let (address, export) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = address.rsplit_once(':')?;
        (inet(host, port), export)
    };
    Some(Map::from_iter([("server".to_owned(), server), ("export".to_owned(), export.into())]))
}

/// The file of an NFS node, in the form of QEMU's options: from a description in JSON, or from
/// `nfs://HOST/PATH?uid=N&gid=N`, in which QEMU escapes nothing, and leaves out what is 0.
pub(super) fn nfs(node: &Node<'_>, options: &Map<String, Value>) -> Option<Map<String, Value>> {
    let (host, path, who) = if node.file.starts_with("json:") {
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let one = options.get("server").and_then(|server| server.get("host"));
        let host = text(options.get("server.host").or(one))?;
        let id = |name: &str| options.get(name).map(number).transpose().ok();
        (host, text(options.get("path"))?, [id("user")?, id("group")?])
    } else {
        let (host, path) = node.file.strip_prefix("nfs://")?.split_once('/')?;
        let (path, who) = match path.rsplit_once('?') {
            Some((path, ids)) if ids_of(ids).is_some() => (path, ids_of(ids)?),
            _ => (path, [None; 2]),
        };
        (host.to_owned(), format!("/{path}"), who)
    };
    if host.is_empty() || !path.starts_with('/') {
        return None;
    }
    let mut file = Map::new();
    file.insert("server".to_owned(), json!({ "type": "inet", "host": host }));
    file.insert("path".to_owned(), path.into());
    let ids = ["user", "group"].into_iter().zip(who);
    file.extend(ids.filter_map(|(name, id)| Some((name.to_owned(), Value::from(id?)))));
    Some(file)
}

/// The user and the group in `uid=1&gid=2`. None if it is anything else.
fn ids_of(text: &str) -> Option<[Option<u64>; 2]> {
    let mut ids = [None; 2];
    for one in text.split('&') {
        let (name, id) = one.split_once('=')?;
        let nth = ["uid", "gid"].iter().position(|known| *known == name)?;
        ids[nth] = Some(id.parse().ok()?);
    }
    Some(ids)
}

fn inet(host: &str, port: &str) -> Value {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    json!({ "type": "inet", "host": bare, "port": port })
}

/// A number, which may be written as a string.
pub(super) fn number(value: &Value) -> Result<u64, String> {
    let text = || value.as_str()?.parse().ok();
    value.as_u64().or_else(text).ok_or_else(|| format!("it starts or ends at `{value}`"))
}
