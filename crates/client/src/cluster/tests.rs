//! Several agents, of which one does not answer.

use std::future::pending;
use std::path::{Path, PathBuf};

use api::PeerInfo;
use axum::routing::get;
use axum::{Json, Router};
use tokio::net::UnixListener;

use super::example::moving;
use super::*;
use crate::Route;

/// Longer than rounds take on a busy machine, and shorter than three waits for a silent agent.
const SOON: Duration = Duration::from_secs(40);

/// An agent at a socket, which says that a VM moves.
fn serve(socket: &Path, host: &'static str) {
    serve_with(socket, host, Arc::default());
}

/// The same, with these peers.
fn serve_with(socket: &Path, host: &'static str, peers: Arc<Mutex<Vec<&'static str>>>) {
    let peer =
        |name: &&str| PeerInfo { name: (*name).to_owned(), rack: None, address: String::new() };
    let info = move || async move {
        Json(HostInfo {
            name: host.to_owned(),
            rack: None,
            version: "0".to_owned(),
            pid: 1,
            listen: String::new(),
            nics: Vec::new(),
            peers: peers.lock().unwrap().iter().map(peer).collect(),
        })
    };
    let migrations = move || async move {
        if host == "silent" {
            return pending().await;
        }
        Json(vec![moving("web1")])
    };
    let router = Router::new()
        .route("/v1/host", get(info))
        .route("/v1/migrations", get(migrations))
        .route("/v1/gangs", get(|| async { Json(Vec::<api::GangProgress>::new()) }));
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(axum::serve(listener, router).into_future());
}

fn client(socket: &Path) -> Client {
    Client::new(Route::Socket(socket.to_owned()))
}

async fn until(what: &str, cluster: &Cluster, is_so: impl Fn(&Known) -> bool) {
    let waited = async {
        while !is_so(&cluster.known()) {
            cluster.refresh().await;
            sleep(HOSTS_SOON).await;
        }
    };
    timeout(SOON, waited).await.expect(what);
}

fn sockets<const N: usize>() -> (tempfile::TempDir, [PathBuf; N]) {
    let dir = tempfile::tempdir().unwrap();
    let sockets = std::array::from_fn(|nth| dir.path().join(format!("{nth}.sock")));
    (dir, sockets)
}

#[tokio::test]
async fn an_agent_that_is_down_is_shown_and_asked_again() {
    let (_dir, [down, up]) = sockets();
    assert!(Cluster::meet(vec![client(&down)]).await.is_err(), "there is nothing to show");
    serve(&up, "host-b");
    let cluster = Arc::new(Cluster::meet(vec![client(&down), client(&up)]).await.unwrap());
    let problems: Vec<String> = cluster.known().problems().map(str::to_owned).collect();
    assert!(problems.len() == 1 && problems[0].contains("0.sock"), "{problems:?}");
    assert!(cluster.any().get::<HostInfo>("/v1/host").await.is_ok(), "another is asked instead");
    let watching = tokio::spawn(Arc::clone(&cluster).watch());
    until("what the other says is shown", &cluster, |known| !known.running().is_empty()).await;
    serve(&down, "host-a");
    until("it is there", &cluster, |known| known.problems().next().is_none()).await;
    assert!(cluster.agent_of("host-a").is_some());
    watching.abort();
}

#[tokio::test]
async fn hosts_that_join_and_leave_are_noticed() {
    let (_dir, [up, other]) = sockets();
    let peers = Arc::new(Mutex::new(vec!["host-b"]));
    serve_with(&up, "host-a", Arc::clone(&peers));
    let cluster = Cluster::meet(vec![client(&up), client(&other)]).await.unwrap();
    let cluster = Arc::new(cluster);
    let listed = || cluster.known().hosts.keys().cloned().collect::<Vec<_>>();
    assert_eq!(listed(), ["host-a", "host-b"]);
    *peers.lock().unwrap() = vec!["host-c"];
    cluster.ask_hosts().await;
    assert_eq!(listed(), ["host-a", "host-b", "host-c"], "the other agent may know host-b");
    serve(&other, "host-c");
    cluster.ask_hosts().await;
    assert_eq!(listed(), ["host-a", "host-c"]);
}

#[tokio::test]
async fn an_agent_that_is_silent_delays_no_other() {
    let (_dir, [silent, up]) = sockets();
    serve(&silent, "silent");
    serve(&up, "host-b");
    let cluster = Arc::new(Cluster::meet(vec![client(&silent), client(&up)]).await.unwrap());
    let watching = tokio::spawn(Arc::clone(&cluster).watch());
    until("what the other says is shown", &cluster, |known| !known.running().is_empty()).await;
    let rounds = async {
        for _ in 0..3 {
            cluster.next_round().await;
        }
    };
    timeout(SOON, rounds).await.expect("rounds go on");
    watching.abort();
}
