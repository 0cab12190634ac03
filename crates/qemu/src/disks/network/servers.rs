//! Which servers the name of an image leads to, as QEMU gives it. A server on the host itself is
//! another one at each host.

use std::net::{IpAddr, Ipv6Addr};

use serde_json::Value;

/// How the names start by which a host knows itself.
const OWN_NAMES: [&str; 5] =
    ["localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"];
/// Transports and kinds of sockets that don't leave the host.
const OWN_TRANSPORTS: [&str; 3] = ["unix", "vsock", "fd"];
/// The option with a Ceph cluster's servers.
const CEPH_SERVERS: [&str; 3] = ["mon_host", "mon-host", "mon host"];

/// Whether a name leads to something on the host itself, or it isn't known where it leads to.
pub(super) fn is_local(file: &str) -> bool {
    if let Some(described) = file.strip_prefix("json:") {
        // QEMU cuts off a description that is too long for it.
        let Ok(node) = serde_json::from_str::<Value>(described) else { return true };
        return is_local_node(&node);
    }
    if let Some(image) = file.strip_prefix("rbd:") {
        return options(image).iter().any(|option| is_local_option_of_rbd(option));
    }
    if let Some((scheme, rest)) = file.split_once("://") {
        return is_local_url(scheme, rest);
    }
    match file.strip_prefix("nbd:") {
        Some(server) => {
            let server = server.split_once(":exportname=").map_or(server, |(server, _)| server);
            server.starts_with("unix:") || is_local_server(server)
        }
        None => true,
    }
}

fn is_local_url(scheme: &str, rest: &str) -> bool {
    let transport = scheme.split_once('+').map_or("", |(_, transport)| transport);
    if OWN_TRANSPORTS.contains(&transport.to_ascii_lowercase().as_str()) {
        return true;
    }
    let authority = rest.split(['/', '?']).next().unwrap_or(rest);
    is_local_server(authority.rsplit_once('@').map_or(authority, |(_, server)| server))
}

/// Whether a node that QEMU describes leads there. Options may be objects in objects, or have a
/// name such as `server.host`.
fn is_local_node(node: &Value) -> bool {
    match node {
        Value::Object(options) => {
            let is_nbd = options.get("driver").and_then(Value::as_str) == Some("nbd");
            options.iter().any(|(name, value)| {
                let name = name.rsplit('.').next().unwrap_or(name);
                match value.as_str() {
                    Some(text) => is_local_option(name, text, is_nbd),
                    None => is_local_node(value),
                }
            })
        }
        Value::Array(nodes) => nodes.iter().any(is_local_node),
        _ => false,
    }
}

fn is_local_option(name: &str, value: &str, is_nbd: bool) -> bool {
    match name {
        "type" => OWN_TRANSPORTS.contains(&value),
        "host" | "portal" => is_local_server(value),
        "url" | "filename" => value.contains("://") && is_local(value),
        // A unix socket, in QEMU's older options. With other drivers it is a file at the server.
        "path" => is_nbd,
        _ => false,
    }
}

/// The options behind the name of a Ceph image, where backslashes stand before colons.
fn options(image: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut letters = image.chars();
    while let Some(letter) = letters.next() {
        let letter = match letter {
            ':' => {
                all.push(String::new());
                continue;
            }
            '\\' => letters.next(),
            letter => Some(letter),
        };
        if let Some(last) = all.last_mut() {
            last.extend(letter);
        }
    }
    all
}

fn is_local_option_of_rbd(option: &str) -> bool {
    let Some((name, servers)) = option.split_once('=') else { return false };
    let servers = servers.split([',', ';', ' ']).filter(|server| !server.is_empty());
    CEPH_SERVERS.contains(&name) && servers.map(plain).any(is_local_server)
}

/// One of Ceph's servers, such as `10.0.0.1:6789` or `[v2:10.0.0.1:3300/0`.
fn plain(server: &str) -> &str {
    let server = server.trim_start_matches('[');
    let versions = ["v1:", "v2:", "any:"];
    let server = versions.iter().find_map(|&one| server.strip_prefix(one)).unwrap_or(server);
    let server = server.trim_start_matches('[');
    server.split([']', '/']).next().unwrap_or(server)
}

/// Whether a server is the host itself; a port may stand behind its name or address.
fn is_local_server(server: &str) -> bool {
    if let Some(bracketed) = server.strip_prefix('[') {
        return is_own(bracketed.split(']').next().unwrap_or(bracketed));
    }
    // QEMU writes a port behind a v6 address without brackets too.
    is_own(server) || server.rsplit_once(':').is_some_and(|(host, _)| is_own(host))
}

fn is_own(host: &str) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    if let Ok(address) = host.parse::<IpAddr>() {
        let address = address.to_canonical();
        return address.is_loopback() || address.is_unspecified();
    }
    // Of an address with a zone, such as `::1%lo`, and of one that is not written out, as `127.1`.
    let zoned = host.split_once('%').and_then(|(address, _)| address.parse::<Ipv6Addr>().ok());
    if zoned.is_some_and(|address| address.is_loopback())
        || host.bytes().all(|one| one.is_ascii_digit() || one == b'.')
    {
        return true;
    }
    let first = host.split('.').next().unwrap_or_default();
    OWN_NAMES.contains(&first) || host.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_to_the_host_itself_are_found() {
        for local in [
            "nbd+unix:///disk?socket=/run/nbd",
            "nbd:unix:/run/nbd:exportname=disk",
            "nbd:localhost:10809:exportname=disk",
            "nbd+vsock://2/disk",
            "nbd://localhost/disk",
            "nbd://LOCALHOST.:10809/disk",
            "nbd://localhost.localdomain:10809/disk",
            "nbd://store.localhost:10809/disk",
            "nbd://127.0.0.1:10809/disk",
            "nbd://127.1:10809/disk",
            "nbd://0.0.0.0:10809",
            "nbd://::1:10809/disk",
            "nbd://::1:8080/disk",
            "nbd://[::ffff:127.0.0.1]:10809/disk",
            "nbd:///disk",
            "ssh://root@127.0.0.1/disk",
            "https://user:pass@localhost:8443/disk",
            "iscsi://[::1]:3260/iqn/0",
            "gluster+unix:///volume/disk?socket=/run/gluster",
            "gluster:///volume/disk",
            "json:{\"server.host\":\"127.0.0.2\"}",
            "json:{\"server.host\":\"::1\",\"driver\":\"nbd\"}",
            "json:{\"driver\":\"nbd\",\"server.type\":\"unix\",\"server.path\":\"/run/nbd\"}",
            "json:{\"driver\":\"nbd\",\"server\":{\"type\":\"fd\",\"str\":\"7\"}}",
            "json:{\"driver\":\"nbd\",\"path\":\"/run/nbd\"}",
            "json:{\"driver\":\"gluster\",\"server\":[{\"type\":\"inet\",\"host\":\"localhost\"}]}",
            "json:{\"driver\":\"iscsi\",\"portal\":\"127.0.0.1:3260\",\"target\":\"iqn\"}",
            "json:{\"driver\":\"https\",\"url\":\"https://localhost/disk\"}",
            "json:{\"driver\":\"nbd\",\"server.host\":\"a-name-that-is-cut-...",
            "rbd:pool/disk:mon_host=[\\:\\:1]\\:6789",
            "rbd:pool/disk:mon_host=[v2\\:10.0.0.1\\:3300/0,v1\\:127.0.0.1\\:6789/0]",
            "something else",
        ] {
            assert!(is_local(local), "{local}");
        }
    }

    #[test]
    fn words_that_only_look_like_the_host_itself_do_not_count() {
        for elsewhere in [
            "nbd://store:10809/disk",
            "nbd://unixstore:10809/disk",
            "nbd://store:10809/unix-disk",
            "nbd://localhosts.example:10809/disk",
            "nbd://my-localhost:10809/localhost",
            "nbd://10.127.0.1:10809/disk",
            "nbd://fd00::1:10809/disk",
            "nbd:store:10809:exportname=unix",
            "ssh://unix@store/srv/localhost/disk",
            "iscsi://[2001:db8::1]:3260/iqn.2003-01.org.x/0",
            "iscsi://store/iqn.2003-01.org.linux-unix:127.0.0.1/0",
            "nfs://store/images/127.0.0.1/localhost.img",
            "gluster+tcp://store/volume/unix.img",
            "rbd:pool/disk",
            "rbd:unix/localhost:id=unix",
            "rbd:pool/disk:mon_host=10.0.0.1\\:6789",
            "rbd:pool/disk:mon_host=[v2\\:10.0.0.1\\:3300/0,v1\\:10.0.0.1\\:6789/0];10.0.0.2",
            "json:{\"driver\":\"rbd\",\"pool\":\"unix\",\"image\":\"localhost\"}",
            "json:{\"driver\":\"nbd\",\"export\":\"unix\",\"server.type\":\"inet\",\
             \"server.host\":\"store\",\"server.port\":\"10809\"}",
            "json:{\"driver\":\"ssh\",\"path\":\"/srv/localhost\",\"server.host\":\"store\"}",
            "json:{\"driver\":\"https\",\"url\":\"https://store/unix/disk\"}",
        ] {
            assert!(!is_local(elsewhere), "{elsewhere}");
        }
    }
}
