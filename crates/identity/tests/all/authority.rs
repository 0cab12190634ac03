//! The CA and what it issues, as files.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use identity::{Authority, AuthorityError, CertificateRequest, FileError, Identity, Role, Subject};

use crate::common::{self, Cluster, mixed, mode};

fn request(cluster: &Cluster, replace: bool) -> CertificateRequest {
    let out = cluster.path().join("out/of/the/way");
    CertificateRequest { subject: Subject::host("a").unwrap(), days: 10, out, replace }
}

#[test]
fn keys_are_for_their_owner_alone() {
    let cluster = Cluster::new();
    assert_eq!(mode(&cluster.path()), 0o700);
    assert_eq!(mode(&cluster.path().join("ca.key")), 0o600);
    assert_eq!(mode(&cluster.path().join("ca.crt")), 0o644);
    let files = cluster.files("a");
    assert_eq!((mode(&files.key), mode(&files.certificate)), (0o600, 0o644));
    let ours = fs::read(&files.authority).unwrap();
    assert_eq!(ours, fs::read(cluster.path().join("ca.crt")).unwrap());

    // A key that everybody can read is not used; one that a group can is.
    fs::set_permissions(&files.key, fs::Permissions::from_mode(0o640)).unwrap();
    assert!(Identity::load("a", &files).is_ok());
    fs::set_permissions(&files.key, fs::Permissions::from_mode(0o644)).unwrap();
    let said = Identity::load("a", &files).unwrap_err().to_string();
    assert!(said.contains("of this host can read"), "{said}");
}

#[test]
fn files_are_replaced_only_on_request() {
    let cluster = Cluster::new();
    let before = fs::read(cluster.path().join("ca.key")).unwrap();
    let said = Authority::create(&cluster.path(), 10).unwrap_err().to_string();
    assert!(said.contains("ca.key already exists: a CA is never replaced"), "{said}");
    assert_eq!(fs::read(cluster.path().join("ca.key")).unwrap(), before);

    let authority = Authority::open(&cluster.path()).unwrap();
    let files = authority.issue(&request(&cluster, false)).unwrap().files;
    let before = fs::read(&files.key).unwrap();
    let said = authority.issue(&request(&cluster, false)).unwrap_err().to_string();
    assert!(said.contains("--replace"), "{said}");
    assert_eq!(fs::read(&files.key).unwrap(), before);
    // One existing file is enough to refuse, and no others appear next to it.
    fs::remove_file(&files.key).unwrap();
    fs::remove_file(&files.authority).unwrap();
    assert_eq!(mode(&files.content_key), 0o600);
    fs::remove_file(&files.content_key).unwrap();
    assert!(authority.issue(&request(&cluster, false)).is_err());
    let left = fs::read_dir(cluster.path().join("out/of/the/way")).unwrap().count();
    assert_eq!(left, 1);

    authority.issue(&request(&cluster, true)).unwrap();
    assert_ne!(fs::read(&files.key).unwrap(), before);
    assert_eq!(mode(&files.key), 0o600);
    assert!(Identity::load("a", &files).is_ok());
}

#[test]
fn a_missing_or_broken_ca_is_reported() {
    let cluster = Cluster::new();
    let other = Cluster::new();
    let none = cluster.path().join("none");
    let said = Authority::open(&none).unwrap_err().to_string();
    assert!(said.contains("droveway ca init --dir"), "{said}");

    let host = cluster.files("a");
    let key = cluster.path().join("ca.key");
    let certificate = cluster.path().join("ca.crt");
    let broken = |says: &str| {
        let said = Authority::open(&cluster.path()).unwrap_err().to_string();
        assert!(said.contains(says), "{said}");
    };
    let good = [fs::read(&key).unwrap(), fs::read(&certificate).unwrap()];
    fs::copy(other.path().join("ca.key"), &key).unwrap();
    broken("ca.key is not the key of ca.crt");
    fs::write(&key, "nothing").unwrap();
    broken("holds no private key");
    fs::remove_file(&key).unwrap();
    broken("reading ");
    fs::write(&key, &good[0]).unwrap();
    broken("of this host can read");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&certificate, "nothing").unwrap();
    broken("holds no certificate");
    fs::write(&certificate, good[1].repeat(2)).unwrap();
    broken("more than one");
    // A host's certificate is no CA's.
    fs::write(&certificate, &good[1]).unwrap();
    fs::copy(&host.key, &key).unwrap();
    fs::copy(&host.certificate, &certificate).unwrap();
    broken("not a CA's");
}

#[test]
fn a_certificate_ends_with_its_ca() {
    let cluster = Cluster::new();
    let authority = Authority::open(&cluster.path()).unwrap();
    let short = authority.issue(&request(&cluster, false)).unwrap();
    assert!(!short.is_shortened);
    assert!(short.validity.not_after_s < authority.validity().not_after_s);
    let long = CertificateRequest { days: 36_500, ..request(&cluster, true) };
    let issued = authority.issue(&long).unwrap();
    assert!(issued.is_shortened);
    assert_eq!(issued.validity.not_after_s, authority.validity().not_after_s);
    let identity = Identity::load("a", &issued.files).unwrap();
    assert_eq!(identity.validity(), issued.validity);
}

#[test]
fn every_certificate_has_a_place_of_its_own() {
    let cluster = Cluster::new();
    let authority = Authority::open(&cluster.path()).unwrap();
    let host = authority.place_for(&Subject::host("x").unwrap());
    let person = authority.place_for(&Subject::client(Role::Observe, "x").unwrap());
    assert!(host.ends_with("hosts/x") && person.ends_with("clients/x"));
}

#[test]
fn an_identity_of_files_that_do_not_belong_together_is_refused() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let (a, b, stranger) = (cluster.files("a"), cluster.files("b"), other.files("a"));
    let told = |name: &str, files, says: &str| {
        let said = Identity::load(name, &files).unwrap_err().to_string();
        assert!(said.contains(says) && !said.contains('\n'), "{said}");
    };
    told("b", a.clone(), "is a certificate of host a, and this host is b");
    told("a", mixed(&stranger, &a), "was not issued by the CA");
    let mut crossed = a.clone();
    crossed.key.clone_from(&b.key);
    told("a", crossed, "is not the key of");
    let mut missing = a.clone();
    missing.certificate = "/nowhere/droveway.crt".into();
    told("a", missing, "reading /nowhere/droveway.crt");
    let mut swapped = a.clone();
    swapped.certificate.clone_from(&a.key);
    told("a", swapped, "holds no certificate");
    let mut ca = a.clone();
    ca.certificate = cluster.path().join("ca.crt");
    ca.key = cluster.path().join("ca.key");
    told("a", ca, "`droveway ca issue` did not make it");
}

#[test]
fn keys_are_never_shown() {
    let cluster = Cluster::new();
    let files = cluster.files("a");
    let identity = Identity::load("a", &files).unwrap();
    let authority = Authority::open(&cluster.path()).unwrap();
    let (ours, _theirs) = common::secured(&cluster);
    let shown = format!("{identity:?} {authority:?} {ours:?}");
    assert!(shown.len() < 1000 && !shown.contains("KEY") && !shown.contains("secret"), "{shown}");
}

#[test]
fn file_errors_have_the_right_kind() {
    let cluster = Cluster::new();
    let outcome = Authority::create(&cluster.path(), 1);
    assert!(matches!(outcome, Err(AuthorityError::File(FileError::Exists { .. }))));
    let file = cluster.path().join("file");
    fs::write(&file, "").unwrap();
    let outcome = Authority::create(&file.join("ca"), 1);
    assert!(matches!(outcome, Err(AuthorityError::File(FileError::Unwritable { .. }))));
}
