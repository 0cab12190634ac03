//! Pages for a browser on this machine: hosts with their VMs, running migrations, history,
//! the plan of an evacuation, and forms that move VMs.
//!
//! Everything is rendered here, from agents' latest answers. The script only refreshes pages
//! and filters tables; without it, everything works after a reload.

#![forbid(unsafe_code)]

mod choice;
mod gate;
mod guard;
mod orders;
mod pages;
mod site;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use agent::Few;
use axum::Router;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use client::cluster::Cluster;
use client::{Client, Problem};
use serde::Deserialize;
use tokio::net::TcpListener;

use gate::Gate;
use site::{Dashboard, Site, page};

/// Connections at a time. Any user of this machine may connect, and would otherwise use up the open
/// files of the dashboard, which then answers nobody.
const CONNECTIONS_MAX: usize = 64;
/// The longest duration of one: a browser connects again.
const CONNECTION_MAX: Duration = Duration::from_secs(600);

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");
const ICON: &str = include_str!("icon.svg");

/// The pages, before they are served.
pub struct Pages {
    listener: TcpListener,
    address: SocketAddr,
    gate: Gate,
    cluster: Arc<Cluster>,
}

impl Pages {
    /// Queries the agents, and listens for browsers. With `read_only`, pages have no forms that
    /// change something.
    ///
    /// # Errors
    /// If no agent answers, or the address can't be listened at.
    pub async fn open(
        listen: SocketAddr,
        agents: Vec<Client>,
        read_only: bool,
    ) -> Result<Self, Problem> {
        let cluster = Arc::new(Cluster::meet(agents).await?);
        let listening = |source| Problem::Local { what: format!("listening at {listen}"), source };
        let listener = TcpListener::bind(listen).await.map_err(listening)?;
        let address = listener.local_addr().map_err(listening)?;
        let gate = Gate::new(address, read_only)?;
        Ok(Self { listener, address, gate, cluster })
    }

    /// Serves them until Ctrl-C. `announce` is called with an address that opens the pages once, and
    /// with the next one when that was used.
    ///
    /// # Errors
    /// If the system refuses.
    pub async fn serve(self, announce: fn(&str)) -> Result<(), Problem> {
        let Self { listener, address, gate, cluster } = self;
        announce(&gate.address());
        let watching = tokio::spawn(Arc::clone(&cluster).watch());
        let app = router(Arc::new(Dashboard { gate, cluster, announce }));
        let served = tokio::select! {
            served = async { axum::serve(few(listener), app).await } => served,
            stopped = tokio::signal::ctrl_c() => stopped,
        };
        watching.abort();
        served.map_err(|source| Problem::Local { what: format!("serving {address}"), source })
    }
}

fn few(listener: TcpListener) -> Few {
    Few::new(listener, CONNECTIONS_MAX, CONNECTION_MAX)
}

/// All pages, behind the gate.
fn router(dashboard: Arc<Dashboard>) -> Router {
    let at = |page: &str| dashboard.gate.path(page);
    Router::new()
        // Without a handler of its own, HEAD would use up the key.
        .route("/open", get(open).head(|| async { StatusCode::NO_CONTENT }))
        .route(&at(""), get(overview))
        .route(&at("vms"), get(vms))
        .route(&at("host"), get(host))
        .route(&at("history"), get(history))
        .route(&at("report"), get(orders::report))
        .route(&at("move"), get(orders::move_form).post(orders::start_move))
        .route(&at("evacuate"), get(orders::plan).post(orders::evacuate))
        .route(&at("cancel"), post(orders::cancel))
        .route(&at("style.css"), get(|| async { asset("text/css", STYLE) }))
        .route(&at("script.js"), get(|| async { asset("text/javascript", SCRIPT) }))
        .route(&at("icon.svg"), get(|| async { asset("image/svg+xml", ICON) }))
        .fallback(|| async {
            page(StatusCode::NOT_FOUND, pages::problem("There is no such page."))
        })
        .layer(from_fn_with_state(Arc::clone(&dashboard), guard::check))
        .with_state(dashboard)
}

#[derive(Deserialize)]
struct Opening {
    #[serde(default)]
    key: String,
}

/// Serves the printed address, and gives the browser its cookie.
async fn open(State(site): Site, Query(Opening { key }): Query<Opening>) -> Response {
    match site.gate.open(&key) {
        Some(cookie) => {
            (site.announce)(&site.gate.address());
            let opened = page(StatusCode::OK, pages::opened(&site.gate.path("")));
            ([(header::SET_COOKIE, cookie)], opened).into_response()
        }
        None => page(StatusCode::FORBIDDEN, pages::locked()),
    }
}

async fn overview(State(site): Site) -> Response {
    site.cluster.refresh().await;
    let known = site.cluster.known();
    page(StatusCode::OK, pages::overview(&known, &site.gate))
}

/// The words to filter a table by.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Filter {
    q: String,
}

async fn vms(State(site): Site, Query(filter): Query<Filter>) -> Response {
    site.cluster.refresh().await;
    let known = site.cluster.known();
    page(StatusCode::OK, pages::vms(&known, &site.gate, &filter.q))
}

async fn history(State(site): Site, Query(filter): Query<Filter>) -> Response {
    site.cluster.refresh().await;
    let known = site.cluster.known();
    page(StatusCode::OK, pages::history(&known, &filter.q))
}

#[derive(Deserialize)]
struct Named {
    #[serde(default)]
    name: String,
}

async fn host(State(site): Site, Query(Named { name }): Query<Named>) -> Response {
    site.cluster.refresh().await;
    let known = site.cluster.known();
    match known.hosts.get(&name) {
        Some(state) => page(StatusCode::OK, pages::host(&known, &name, state, &site.gate)),
        None => page(StatusCode::NOT_FOUND, pages::problem("No host has that name.")),
    }
}

fn asset(kind: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

#[cfg(test)]
mod tests;
