//! Delivery of events to the operator's receiver: signed, one at a time, and retried until
//! it is accepted.
//!
//! Headers and signature are those of [Standard Webhooks](https://www.standardwebhooks.com),
//! for which libraries exist.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::sleep;
use ureq::Proxy;
use ureq::http::StatusCode;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::config::Webhook;
use crate::events::Reader;

/// How long a receiver may take to answer; a slower one should answer first and work later.
const ANSWER_MAX: Duration = Duration::from_secs(10);
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Sends events for as long as the agent runs.
///
/// Events wait in their ring, so a receiver that is down for long gets a gap in place of the
/// oldest.
pub(crate) async fn follow(webhook: Webhook, mut reader: Reader) {
    let sender = Arc::new(Sender::new(webhook));
    while let Some(frame) = reader.next().await {
        let text = String::from_utf8_lossy(&frame);
        let field = |name| text.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        // The first frame has only an id to resume from, and no data.
        let (Some(id), Some(name), Some(body)) = (field("id: "), field("event: "), field("data: "))
        else {
            continue;
        };
        if sender.webhook.wants(&name) {
            sender.deliver(id, body).await;
        }
    }
}

struct Sender {
    webhook: Webhook,
    agent: ureq::Agent,
}

impl Sender {
    fn new(webhook: Webhook) -> Self {
        let roots = webhook.authorities.iter().map(|root| Certificate::from_der(root).to_owned());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::Specific(Arc::new(roots.collect())))
            .unversioned_rustls_crypto_provider(provider)
            .build();
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(ANSWER_MAX))
            // A signed event is only for the receiver that the operator named.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .user_agent(concat!("droveway/", env!("CARGO_PKG_VERSION")))
            .proxy(proxy(&webhook, Proxy::try_from_env()))
            .tls_config(tls)
            .build();
        Self { webhook, agent: config.into() }
    }

    /// Sends an event until it is accepted, or refused for good.
    async fn deliver(self: &Arc<Self>, id: String, body: String) {
        let (id, body) = (Arc::new(id), Arc::new(body));
        let mut pause = PAUSE_MIN;
        loop {
            let (sender, its_id, its_body) = (Arc::clone(self), Arc::clone(&id), Arc::clone(&body));
            let post = move || sender.post(&its_id, &its_body);
            let attempt = tokio::task::spawn_blocking(post).await;
            match attempt.unwrap_or_else(|error| Attempt::Failed(error.to_string())) {
                Attempt::Accepted => return,
                Attempt::Refused(why) => {
                    tracing::error!(event = *id, why, "the webhook's receiver refuses an event");
                    return;
                }
                Attempt::Failed(why) => {
                    let again_s = pause.as_secs();
                    tracing::warn!(
                        event = *id,
                        why,
                        again_s,
                        "the webhook's receiver accepted no event"
                    );
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn post(&self, id: &str, body: &str) -> Attempt {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at_unix_s = since.as_secs();
        let posted = self
            .agent
            .post(&self.webhook.url)
            .header("content-type", "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", at_unix_s.to_string())
            .header("webhook-signature", self.webhook.secret.sign(id, at_unix_s, body))
            .send(body);
        match posted {
            Ok(answer) => outcome_of(answer.status()),
            Err(error) => Attempt::Failed(error.to_string()),
        }
    }
}

/// The proxy to the receiver, if one is `usual` here. Events for a receiver on this host, which may
/// be unencrypted, do not leave it.
fn proxy(webhook: &Webhook, usual: Option<Proxy>) -> Option<Proxy> {
    usual.filter(|_| !webhook.is_here())
}

/// The result of one attempt.
#[derive(Debug, PartialEq, Eq)]
enum Attempt {
    Accepted,
    /// The receiver will never accept this event.
    Refused(String),
    /// The receiver may accept it later.
    Failed(String),
}

fn outcome_of(status: StatusCode) -> Attempt {
    let answer = format!("it answered {status}");
    match status {
        _ if status.is_success() => Attempt::Accepted,
        // The last three mean that the receiver's configuration is wrong, which can be fixed.
        StatusCode::REQUEST_TIMEOUT
        | StatusCode::TOO_EARLY
        | StatusCode::TOO_MANY_REQUESTS
        | StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::NOT_FOUND => Attempt::Failed(answer),
        _ if status.is_client_error() => Attempt::Refused(answer),
        _ => Attempt::Failed(answer),
    }
}

#[cfg(test)]
mod tests;
