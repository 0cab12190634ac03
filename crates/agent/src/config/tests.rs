use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;

const PEERS: &str = r#"
[[host]]
name = "host-a"
rack = "r1"
address = "10.0.0.1:7450"
nics = ["10.0.0.1"]

[[host]]
name = "host-b"
address = "10.0.0.2:7450"
nics = ["10.0.0.2", "10.0.1.2"]
"#;

struct Files(tempfile::TempDir);

impl Files {
    fn new(config: &str, peers: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("agent.toml"), config).unwrap();
        fs::write(dir.path().join("peers.toml"), peers).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self) -> Result<Config, ConfigError> {
        let typed = Settings { config: Some(self.path("agent.toml")), ..Settings::default() };
        Config::with_tls_default(typed, Path::new("/nowhere/tls"))
    }
}

fn flags() -> Settings {
    Settings {
        name: Some("host-a".to_owned()),
        listen: Some("127.0.0.1:7450".parse().unwrap()),
        ..Settings::default()
    }
}

#[test]
fn flags_alone_suffice() {
    let config = Config::new(flags()).unwrap();
    assert_eq!(config.name, "host-a");
    assert_eq!(config.state, Path::new(STATE_DEFAULT));
    assert_eq!(config.api, Path::new(API_DEFAULT));
    assert_eq!(config.pool_bytes, 128 << 20);
    assert!(config.peers.is_empty() && config.nics.is_empty());
}

#[test]
fn the_own_entry_says_where_to_listen_and_is_no_peer() {
    let files = Files::new(
        "name = 'host-a'\npeers = 'peers.toml'\nstate = 'state'\ninsecure-plaintext = true",
        PEERS,
    );
    let config = files.read().unwrap();
    assert_eq!(config.listen, "10.0.0.1:7450".parse().unwrap());
    assert_eq!(config.rack.as_deref(), Some("r1"));
    assert_eq!(config.nics, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
    let names: Vec<&str> = config.peers.iter().map(|peer| peer.name.as_str()).collect();
    assert_eq!(names, ["host-b"]);
    assert_eq!(config.state, files.path("state"), "paths are meant from the file");
}

#[test]
fn hosts_know_the_uplink_of_their_rack() {
    let rack = "[[rack]]\nname = 'r1'\nuplink = '40G'\n";
    let hosts = |peers: &str| peers::parse(Path::new("peers.toml"), peers);
    let uplinks: Vec<_> =
        hosts(&format!("{PEERS}{rack}")).unwrap().into_iter().map(|host| host.uplink).collect();
    assert_eq!(uplinks, [Some("40G".parse().unwrap()), None]);
    let twice = hosts(&format!("{PEERS}{rack}{rack}")).unwrap_err().to_string();
    assert!(twice.contains("rack `r1`: is listed twice"), "{twice}");
}

#[test]
fn flags_win_over_the_file() {
    let files = Files::new(
        "name = 'host-b'\nlisten = '127.0.0.1:1'\npool-mib = 64\nrack = 'r1'\n\
                    nic-speed = ['127.0.0.1=10G']\nqemu-programs = ['/opt/q/qemu-*']\n\
                    cpu-floor = 20",
        "",
    );
    let config = Config::new(Settings {
        config: Some(files.path("agent.toml")),
        pool_mib: Some(32),
        ..flags()
    })
    .unwrap();
    assert_eq!((config.name.as_str(), config.listen.port()), ("host-a", 7450));
    assert_eq!(config.pool_bytes, 32 << 20);
    assert_eq!(config.rack.as_deref(), Some("r1"));
    assert_eq!(config.nic_speeds, ["127.0.0.1=10G".parse::<NicSpeed>().unwrap()]);
    assert_eq!(config.qemu_programs, ["/opt/q/qemu-*"]);
    assert_eq!(config.cpu_floor.to_string(), "20%");
    let config = Config::new(flags()).unwrap();
    assert_eq!(config.qemu_programs, USUAL);
    assert_eq!(config.cpu_floor, defaults::CPU_FLOOR_DEFAULT);
}

#[test]
fn a_certificate_is_used_where_there_is_one_unless_somebody_says_otherwise() {
    let there = tempfile::tempdir().unwrap();
    let files = |config: &str| {
        let config = format!("name = 'a'\nlisten = '0.0.0.0:1'\n{config}");
        Files::new(&config, "")
    };
    let chosen = |files: &Files, typed: Settings| {
        let typed = Settings { config: Some(files.path("agent.toml")), ..typed };
        let config = Config::with_tls_default(typed, there.path()).unwrap();
        (config.tls, config.insecure_plaintext)
    };
    let typed = |tls: Option<&str>, insecure_plaintext| Settings {
        tls: tls.map(PathBuf::from),
        insecure_plaintext,
        ..Settings::default()
    };
    let (nothing, plain, own) = (files(""), files("insecure-plaintext = true"), files("tls = 'x'"));
    let by_default = Some(there.path().to_owned());
    assert_eq!(chosen(&nothing, Settings::default()), (by_default, false));
    assert_eq!(chosen(&nothing, typed(None, true)), (None, true));
    assert_eq!(chosen(&plain, Settings::default()), (None, true));
    assert_eq!(chosen(&plain, typed(Some("/t"), false)), (Some("/t".into()), false));
    assert_eq!(chosen(&own, Settings::default()), (Some(own.path("x")), false));
    assert_eq!(chosen(&own, typed(None, true)), (None, true));
}

#[test]
fn errors_say_where_and_what_to_do() {
    for (config, peers, says) in [
        ("listen = '127.0.0.1:1'", "", "--name"),
        ("name = 'a'", "", "--listen"),
        ("name = 'a/b'\nlisten = '127.0.0.1:1'", "", "`a/b` is not a name"),
        ("\nnaem = 'a'", "", "agent.toml:2: unknown field `naem`"),
        ("name = 'a'\nlisten = 'there'", "", "agent.toml:2: "),
        ("name = 'a'\nlisten = 3", "", "agent.toml:2: "),
        ("name = ", "", "agent.toml:1: "),
        ("name = 'a'\nlisten = '127.0.0.1:0'", "", "port"),
        ("name = 'a'\nlisten = '127.0.0.1:1'\npool-mib = 1", "", "pool-mib: 1 is outside 16 to"),
        ("name = 'a'\ncpu-floor = 0", "", "`0` is not a percentage from 1 to 100"),
        ("name = 'a'\nlisten = '0.0.0.0:1'", "", "droveway ca issue a"),
        ("name = 'a'\nlisten = '10.0.0.1:1'", "", "--insecure-plaintext"),
        (
            "name = 'a'\nlisten = '127.0.0.1:1'\ntls = 't'\ninsecure-plaintext = true",
            "",
            "contradict",
        ),
        ("name = 'a'\nlisten = '127.0.0.1:1'\napi-listen = '127.0.0.1:2'", "", "ca issue a"),
        ("name = 'a'\nlisten = '127.0.0.1:1'\nnic = ['10.0.0.1']", "", "listen at 0.0.0.0:1"),
        ("name = 'a'\nlisten = '127.0.0.1:1'\nnic-speed = ['127.0.0.1=x']", "", "ADDR=RATE"),
        (
            "name = 'a'\nlisten = '127.0.0.1:1'\nnic = ['127.0.0.1']\nnic-speed = ['127.0.0.2=1G']",
            "",
            "nic-speed: 127.0.0.2",
        ),
        ("name = 'a'\nlisten = '127.0.0.1:1'\npeers = 'none.toml'", "", "reading "),
        (
            "name = 'a'\npeers = 'peers.toml'",
            "[[host]]\nname = 'b'",
            "peers.toml:1: missing field `address`",
        ),
        ("name = 'a'\npeers = 'peers.toml'", "[[hosts]]\nname = 'b'", "unknown field `hosts`"),
        (
            "name = 'a'\npeers = 'peers.toml'",
            "[[host]]\nname = 'b'\naddress = '0.0.0.0:1'",
            "host `b`: address 0.0.0.0:1",
        ),
        (
            "name = 'a'\npeers = 'peers.toml'",
            "[[host]]\nname = 'b'\naddress = '10.0.0.1:1'\n[[host]]\nname = 'b'\naddress = '10.0.0.1:1'",
            "host `b`: is listed twice",
        ),
        (
            "name = 'a'\npeers = 'peers.toml'",
            "[[rack]]\nname = 'r1'\nuplink = '10G'",
            "rack `r1`: no host stands in it",
        ),
        (
            "name = 'a'\npeers = 'peers.toml'",
            "[[rack]]\nname = 'r1'\nuplink = 'wide'",
            "is not a rate",
        ),
    ] {
        let error = Files::new(config, peers).read().unwrap_err().to_string();
        assert!(error.contains(says), "{config:?} {peers:?}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn who_may_order_moves_is_named_in_the_file() {
    let base = "name = 'host-a'\nlisten = '127.0.0.1:7450'\n";
    assert_eq!(Files::new(base, PEERS).read().unwrap().coordinators, None);
    let named = format!("{base}coordinators = ['host-b']\n");
    let config = Files::new(&named, PEERS).read().unwrap();
    assert_eq!(config.coordinators, Some(vec!["host-b".to_owned()]));
}

#[test]
fn urls_with_passwords_are_for_files_of_their_own() {
    let config = "name = 'a'\nlisten = '127.0.0.1:1'\n";
    let files = Files::new(&format!("{config}directory-file = 'redis'"), "");
    let write = |name: &str, text: &str, mode| {
        fs::write(files.path(name), text).unwrap();
        fs::set_permissions(files.path(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    let url = "redis://:hunter2@10.0.0.9";
    write("redis", &format!("{url}\n"), 0o644);
    let open = files.read().unwrap_err().to_string();
    assert!(open.contains("chmod 600") && open.contains("/redis has a secret"), "{open}");
    write("redis", &format!("{url}\n"), 0o600);
    let read = files.read().unwrap();
    assert_eq!(read.directory, DirectoryChoice::Redis(vec![url.to_owned()]));
    assert!(read.passwords.is_empty());
    write("redis", "redi://:hunter2@10.0.0.9", 0o600);
    let wrong = files.read().unwrap_err().to_string();
    assert!(wrong.starts_with("directory-file: ") && !wrong.contains("hunter2"), "{wrong}");

    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    write("secret", secret, 0o600);
    write("hook", "http://a:hunter2@127.0.0.1/\n", 0o600);
    let hook = |lines: &str| {
        let text = format!("{config}[webhook]\nsecret-file = 'secret'\n{lines}");
        write("agent.toml", &text, 0o600);
        files.read()
    };
    let read = hook("url-file = 'hook'").unwrap();
    assert_eq!(read.webhook.unwrap().url, "http://a:hunter2@127.0.0.1/");
    assert!(read.passwords.is_empty());
    for (lines, says) in [
        ("url = 'http://127.0.0.1/'\nurl-file = 'hook'", "url-file contradict"),
        ("", "url, or url-file, is missing"),
        ("url-file = 'none'", "reading "),
    ] {
        let error = hook(lines).unwrap_err().to_string();
        assert!(error.contains(says), "{lines}: {error}");
    }

    // Where they are all the same, the operator is warned as long as others can read them.
    let both = format!("directory = '{url}'\ndirectory-file = 'redis'\n{config}");
    write("agent.toml", &both, 0o600);
    assert!(files.read().unwrap_err().to_string().contains("directory and directory-file"));
    let file = "url = 'http://a:hunter2@127.0.0.1/'";
    let read = hook(file).unwrap();
    assert_eq!(read.passwords.len(), 1);
    assert_eq!(read.passwords[0].exposure(), None);
    let directory = Some(url.parse().unwrap());
    let config = Some(files.path("agent.toml"));
    let typed = Settings { config, directory, ..Settings::default() };
    let read = Config::with_tls_default(typed, Path::new("/nowhere/tls")).unwrap();
    write("agent.toml", &fs::read_to_string(files.path("agent.toml")).unwrap(), 0o644);
    let exposed: Vec<_> = read.passwords.iter().filter_map(Password::exposure).collect();
    assert!(exposed[0].contains("--directory is in the list of processes"), "{exposed:?}");
    assert!(exposed[1].contains("agent.toml, where url under [webhook] has"), "{exposed:?}");
    assert!(!exposed.concat().contains("hunter2"));
}

/// The file that packages install changes nothing as it is, and shows every setting.
#[test]
fn the_packaged_file_has_every_setting() {
    let text = include_str!("../../../../dist/agent.toml");
    let as_it_is: toml::Table = toml::from_str(text).unwrap();
    assert_eq!(as_it_is.keys().collect::<Vec<_>>(), ["peers"]);
    let shown = text.lines().filter_map(|line| {
        let setting = line.strip_prefix("# ")?;
        (setting.contains(" = ") || setting.starts_with('[')).then_some(setting)
    });
    let shown = shown.collect::<Vec<_>>().join("\n");
    toml::from_str::<Settings>(&shown).unwrap();
    let shown: toml::Table = toml::from_str(&shown).unwrap();
    let refused = toml::from_str::<Settings>("colour = 1").unwrap_err().to_string();
    let (_, known) = refused.split_once("expected one of").unwrap();
    let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
    assert!(known.len() > 20, "{refused}");
    for key in known {
        assert!(shown.contains_key(key) || as_it_is.contains_key(key), "{key} is not there");
    }
}

/// The file that each node gets from `dist/kubevirt`.
#[test]
fn kubevirts_file_is_understood() {
    let text = include_str!("../../../../dist/kubevirt/agent.toml");
    let file: Settings = toml::from_str(text).unwrap();
    let own = peers::parse(Path::new("peers.toml"), PEERS).unwrap().swap_remove(0);
    let carry = file.carry.unwrap().understood(Some(&own), None).unwrap();
    assert_eq!(carry.manager, Manager::Kubevirt);
    assert_eq!(carry.request.sharing.share, api::Share::Off);
}

#[test]
fn domains_of_xen_arrive_only_from_hosts_that_are_named() {
    let read = |section: &str| {
        let config = format!("name = 'host-a'\nlisten = '127.0.0.1:7450'\n{section}");
        Files::new(&config, "").read()
    };
    assert_eq!(read("").unwrap().xen, None);
    let xen = read("[xen]").unwrap().xen.unwrap();
    assert_eq!((xen.xl.as_path(), xen.accept_from.len()), (Path::new("/usr/sbin/xl"), 0));
    let xen = read("[xen]\nxl = '/opt/xl'\naccept-from = ['host-b']").unwrap().xen.unwrap();
    let expected = Xen { xl: "/opt/xl".into(), accept_from: vec!["host-b".to_owned()] };
    assert_eq!(xen, expected);
    for (section, part) in [
        ("[xen]\nxl = 'xl'", "not an absolute path"),
        ("[xen]\naccept-from = ['../b']", "accept-from"),
    ] {
        let error = read(section).unwrap_err().to_string();
        assert!(error.starts_with("[xen] ") && error.contains(part), "{error}");
    }
}
