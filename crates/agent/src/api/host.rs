//! This host in the API, `/v1/host`, and whether it is fit for migrations, `/v1/doctor`.

use api::{Examination, HostInfo, PeerInfo};
use axum::Json;
use axum::extract::State;

use super::answer::{Answer, blocking};
use super::parts::Api;
use super::request::Name;
use crate::config::PeerEntry;

pub(super) async fn show(State(api): State<Api>) -> Json<HostInfo> {
    let peer = |peer: &PeerEntry| PeerInfo {
        name: peer.name.clone(),
        rack: peer.rack.clone(),
        address: peer.address.to_string(),
    };
    let peers = api.peers.now().iter().map(peer).collect();
    Json(HostInfo { peers, ..(*api.host).clone() })
}

pub(super) async fn examine(State(api): State<Api>) -> Answer<Examination> {
    blocking(move || Ok(api.examiner.examine_host())).await.map(Json)
}

pub(super) async fn examine_pair(State(api): State<Api>, Name(host): Name) -> Answer<Examination> {
    blocking(move || api.examiner.examine_pair(&host)).await.map(Json)
}
