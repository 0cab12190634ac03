//! Storage services: a name means the same one at every host, unless it leads to the host itself or
//! to a cluster that each host's own configuration names.

mod servers;

use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::Proof;
use super::content::open_plain;

/// Where Ceph's clients look if an image names no configuration.
const CEPH_CONF: &str = "/etc/ceph/ceph.conf";
/// Most that is read of a configuration, whose path another host may have named.
const CONF_BYTES_MAX: u64 = 1 << 20;
/// The length of a cluster's id, a UUID.
const FSID_CHARS: usize = 36;

/// The proof for an image that QEMU reaches with this driver under this name.
pub(super) fn proof(driver: &str, file: &str) -> Proof {
    if let Err(reason) = is_elsewhere(file) {
        return Proof::Impossible { reason };
    }
    let cluster = if driver == "rbd" { cluster(file) } else { None };
    Proof::Network { cluster }
}

/// Whether a service isn't one of the host itself.
pub(super) fn is_elsewhere(file: &str) -> Result<(), String> {
    if servers::is_local(file) {
        return Err(format!(
            "{file} is a service of this host, or its name doesn't identify a host"
        ));
    }
    Ok(())
}

/// Whether the image is in the source's Ceph cluster, as far as both hosts know: it may have another
/// name here.
pub(super) fn same_cluster(image: &str, theirs: Option<&str>) -> Result<(), String> {
    let Some(theirs) = theirs else { return Ok(()) };
    match cluster(image) {
        Some(here) if !here.eq_ignore_ascii_case(theirs) => {
            Err(format!("here it is in the Ceph cluster {here}, at the source in {theirs}"))
        }
        _ => Ok(()),
    }
}

/// The id of the Ceph cluster that this host's configuration names for an image.
fn cluster(image: &str) -> Option<String> {
    let path = conf(image)?;
    let path = Path::new(&path);
    if !path.is_absolute() {
        return None;
    }
    let mut text = String::new();
    open_plain(path).ok()?.take(CONF_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.lines().find_map(fsid)
}

/// The configuration that leads to an image's cluster; none if the image names its servers.
fn conf(image: &str) -> Option<String> {
    let named = if let Some(described) = image.strip_prefix("json:") {
        let options: Value = serde_json::from_str(described).ok()?;
        let options = options.as_object()?;
        if options.keys().any(|key| key.starts_with("server")) {
            return None;
        }
        options.get("conf").and_then(Value::as_str).map(str::to_owned)
    } else {
        if image.contains(":mon_host=") || image.contains(":mon-host=") {
            return None;
        }
        image.split(':').find_map(|word| word.strip_prefix("conf=")).map(str::to_owned)
    };
    Some(named.unwrap_or_else(|| CEPH_CONF.to_owned()))
}

/// The id that a line of a configuration has.
fn fsid(line: &str) -> Option<String> {
    let (key, value) = line.split_once('=')?;
    let value = value.split([';', '#']).next()?.trim();
    // Nothing else of a file is ever repeated to another host.
    let is_id =
        value.len() == FSID_CHARS && value.chars().all(|one| one.is_ascii_hexdigit() || one == '-');
    (key.trim() == "fsid" && is_id).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const HERE: &str = "11111111-2222-3333-4444-55555555555a";
    const THERE: &str = "99999999-2222-3333-4444-555555555555";

    #[test]
    fn two_ceph_clusters_with_the_same_names_are_not_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let conf = dir.path().join("ceph.conf");
        let text = format!("[global]\n# fsid = {THERE}\n fsid = {HERE} ; ours\nmon_host = a\n");
        fs::write(&conf, text).unwrap();
        let conf = conf.display().to_string();
        let image = format!("rbd:pool/disk:id=a:conf={conf}");
        let described = format!("json:{}", serde_json::json!({ "pool": "p", "conf": conf }));
        for image in [&image, &described] {
            let made = proof("rbd", image);
            assert_eq!(made, Proof::Network { cluster: Some(HERE.to_owned()) });
            assert_eq!(same_cluster(image, Some(HERE)), Ok(()));
            assert_eq!(same_cluster(image, Some(&HERE.to_uppercase())), Ok(()));
            let refused = same_cluster(image, Some(THERE)).unwrap_err();
            assert!(refused.contains(HERE) && refused.contains(THERE), "{refused}");
            // From an agent that names no cluster.
            assert_eq!(same_cluster(image, None), Ok(()));
        }
        // Its servers are named, so they are the same everywhere.
        for image in [
            format!("{image}:mon_host=10.0.0.1"),
            format!("json:{}", serde_json::json!({ "server.0.host": "a", "conf": conf })),
            "rbd:pool/disk:conf=ceph.conf".to_owned(),
            "rbd:pool/disk:conf=/nonexistent".to_owned(),
        ] {
            assert_eq!(proof("rbd", &image), Proof::Network { cluster: None }, "{image}");
            assert_eq!(same_cluster(&image, Some(THERE)), Ok(()), "{image}");
        }
    }

    #[test]
    fn an_image_that_is_called_a_service_of_this_host_is_not_the_sources() {
        assert_eq!(is_elsewhere("nbd://store/disk"), Ok(()));
        let refused = is_elsewhere("nbd+unix:///disk?socket=/run/nbd").unwrap_err();
        assert!(refused.contains("is a service of this host"), "{refused}");
    }

    #[test]
    fn only_the_id_of_a_cluster_is_read_from_a_file() {
        assert_eq!(fsid(&format!("fsid={HERE}")).as_deref(), Some(HERE));
        for line in ["fsid = secret", "key = 11111111-2222-3333-4444-55555555555a", "fsid", ""] {
            assert_eq!(fsid(line), None, "{line}");
        }
    }
}
