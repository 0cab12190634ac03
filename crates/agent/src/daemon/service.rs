//! The API is served until a signal arrives, and then all ends in order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::Server;
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::error::{AgentError, local_error};
use super::open::{Domains, Followed, Open, PeersReading};
use super::reserved::Listeners;
use super::{renewal, service_manager};
use crate::api::{Api, router, serve_metrics, webhook};
use crate::carry::CarryListeners;
use crate::moves::migrations::Migrations;
use crate::peers;
use crate::vms::registry::Registry;

/// How long a stopping agent waits for responses that are being written.
const ANSWERS_WAIT: Duration = Duration::from_secs(5);
/// How long a stopping agent waits for the QEMUs of cancelled arrivals to end.
const ARRIVALS_WAIT: Duration = Duration::from_secs(30);
/// How long a stopping agent waits for carried VMs in post-copy, which stop if their connections
/// break. The units in dist/ give the agent more time than that to end.
const POSTCOPY_WAIT: Duration = Duration::from_secs(300);

impl Open {
    /// Serves the API until a signal arrives; VMs keep running.
    pub(super) fn serve(self) -> Result<(), AgentError> {
        let Self { runtime, socket, api, refuse, listeners, server, .. } = self;
        let Self { carry_listeners, domains, followed, .. } = self;
        let domain_settlers = domains.as_ref().map(|domains| Arc::clone(&domains.settlers));
        let settlers = Arc::clone(&api.settlers);
        let served = runtime.block_on(async {
            let mut signals = Signals::new()?;
            let events = Arc::clone(&api.events);
            let serving = Serving::begin(api.clone(), listeners)?;
            tracing::info!(host = api.host.name, listen = api.host.listen, "the agent is ready");
            service_manager::tell(NotifyState::Ready);
            let sending_events = follow(followed, &api);
            signals.next().await;
            tracing::info!("stopping; migrations are cancelled, VMs keep running");
            service_manager::tell(NotifyState::Stopping);
            // During the shutdown the API answers, but starts nothing.
            let _ = refuse.send(true);
            let winding_down = tokio::task::spawn_blocking(move || {
                wind_down(&api, server, carry_listeners, domains);
            });
            tokio::select! {
                _ = winding_down => {}
                // A second signal ends the agent at once; the next start cleans up.
                () = signals.next() => return Ok(()),
            }
            // Only now, because the ends of migrations are events too.
            events.close();
            serving.end().await;
            if let Some(sending) = sending_events {
                let _ = tokio::time::timeout(ANSWERS_WAIT, sending).await;
            }
            Ok(())
        });
        runtime.shutdown_background();
        settlers.close();
        if let Some(settlers) = domain_settlers {
            settlers.close();
        }
        drop(socket);
        tracing::info!("ended; VMs keep running");
        served
    }
}

/// The signals that end an agent.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> Result<Self, AgentError> {
        let of = |kind| signal(kind).map_err(|source| local_error("serving the API", source));
        Ok(Self {
            interrupt: of(SignalKind::interrupt())?,
            terminate: of(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// The API and the metrics while they are served.
struct Serving {
    api: JoinHandle<std::io::Result<()>>,
    /// Over TCP, and metrics at an address of their own.
    others: Vec<JoinHandle<()>>,
    close: watch::Sender<bool>,
}

impl Serving {
    fn begin(api: Api, listeners: Listeners) -> Result<Self, AgentError> {
        let serving = |source| local_error("serving the API", source);
        let Listeners { api: listener, people, metrics } = listeners;
        listener.set_nonblocking(true).map_err(serving)?;
        let listener = tokio::net::UnixListener::from_std(listener).map_err(serving)?;
        let (close, mut closed) = watch::channel(false);
        let serving_people = people.map(|port| {
            let serving = port.serve(api.clone(), closed.clone());
            tokio::spawn(async {
                if let Err(error) = serving.await {
                    tracing::error!(%error, "the API's TCP listener has failed");
                }
            })
        });
        let serving_metrics = metrics.map(|listener| {
            let serving = serve_metrics(listener, api.clone(), closed.clone());
            tokio::spawn(async {
                if let Err(error) = serving.await {
                    tracing::error!(%error, "the listener for metrics has failed");
                }
            })
        });
        let serving_api = tokio::spawn(
            axum::serve(listener, router(api))
                .with_graceful_shutdown(async move {
                    // An error means that the sender was dropped, which is an end as well.
                    let _ = closed.wait_for(|closing| *closing).await;
                })
                .into_future(),
        );
        let others = serving_people.into_iter().chain(serving_metrics).collect();
        Ok(Self { api: serving_api, others, close })
    }

    /// Accepts no more requests, and waits for responses that are being written.
    async fn end(self) {
        let _ = self.close.send(true);
        let _ = tokio::time::timeout(ANSWERS_WAIT, self.api).await;
        for serving in self.others {
            let _ = tokio::time::timeout(ANSWERS_WAIT, serving).await;
        }
    }
}

/// Starts what watches files, sends events and reports to the service manager. Returns the sending
/// of events, if there is a webhook: the last ones come at the end.
fn follow(followed: Followed, api: &Api) -> Option<JoinHandle<()>> {
    let Followed { certificate, peers, webhook, hangups: [for_peers, for_certificate] } = followed;
    if let Some(PeersReading { file, peers, others }) = peers {
        tokio::spawn(peers::follow(file, peers, others, for_peers));
    }
    if let Some((identity, files)) = certificate {
        let events = Arc::clone(&api.events);
        tokio::spawn(renewal::follow(identity, files, events, for_certificate));
    }
    tokio::spawn(service_manager::watched());
    let (registry, migrations) = (Arc::clone(&api.registry), Arc::clone(&api.migrations));
    tokio::spawn(service_manager::shown(move || in_a_line(&registry, &migrations)));
    webhook.map(|(webhook, reader)| tokio::spawn(webhook::follow(webhook, reader)))
}

/// Ends migrations, and waits for what can't be cancelled.
fn wind_down(
    api: &Api,
    mut server: Server,
    mut carry_listeners: Option<CarryListeners>,
    mut domains: Option<Domains>,
) {
    let until = Instant::now() + POSTCOPY_WAIT;
    if let Some(carry_listeners) = &mut carry_listeners {
        carry_listeners.stop_accepting();
    }
    if let Some(domains) = &mut domains {
        domains.listener.stop_accepting();
    }
    // First, so that gangs don't take the end of this agent's migrations for failures.
    api.gangs.close();
    api.migrations.close(until);
    if let Some(carry_listeners) = &carry_listeners {
        carry_listeners.wait_for_bypasses(until);
    }
    // Joins the threads of what was carried, which publish how it ended.
    drop((carry_listeners, domains));
    let vms = server.wait_postcopies(until);
    if vms > 0 {
        tracing::error!(
            vms,
            "aborting migrations in post-copy: VMs that run here stop now, until their \
             managers resume their migrations"
        );
    }
    server.stop();
    if !api.registry.wait_none_arriving(ARRIVALS_WAIT) {
        tracing::warn!("a VM that was arriving is still there");
    }
}

/// The agent's state, for the line of `systemctl status`.
fn in_a_line(registry: &Registry, migrations: &Migrations) -> String {
    let moving = migrations.moving().len();
    format!("VMs: {}, migrations from here: {moving}", registry.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each QEMU that hangs takes seconds, and killing the agent would not make it ready sooner.
    #[test]
    fn an_agent_may_take_its_time_to_find_its_vms() {
        for unit in [
            include_str!("../../../../dist/systemd/droveway.service"),
            include_str!("../../../../dist/systemd/droveway-carry.service"),
        ] {
            assert!(unit.lines().any(|line| line == "Type=notify"), "{unit}");
            assert!(unit.lines().any(|line| line == "TimeoutStartSec=infinity"), "{unit}");
        }
    }

    #[test]
    fn an_agent_that_waits_for_a_post_copy_is_not_killed_before() {
        let stop = "TimeoutStopSec=";
        let files = [
            (include_str!("../../../../dist/systemd/droveway.service"), stop),
            (include_str!("../../../../dist/systemd/droveway-carry.service"), stop),
            (
                include_str!("../../../../dist/kubevirt/daemonset.yaml"),
                "terminationGracePeriodSeconds: ",
            ),
        ];
        for (text, key) in files {
            let seconds = text.lines().find_map(|line| line.trim().strip_prefix(key)).unwrap();
            let time = Duration::from_secs(seconds.parse().unwrap());
            assert!(time > POSTCOPY_WAIT + ARRIVALS_WAIT + 3 * ANSWERS_WAIT, "{key}{seconds}");
        }
    }
}
