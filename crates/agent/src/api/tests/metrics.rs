//! `/metrics`, by many readers.

use std::time::Duration;

use api::{Outcome, Progress, Report};

use super::*;

/// Each collection queries all QEMUs, and readers need no certificate.
#[tokio::test]
async fn all_readers_get_what_was_collected_once() {
    let ever = Duration::from_secs(3600);
    let mut site = Site::new();
    site.api.metrics = CachedText::new(ever, ever);
    site.router = router(site.api.clone());
    let (status, before) = site.ask("GET", "/metrics", "").await;
    assert_eq!(status, 200);
    let done = "droveway_migrations_total{outcome=\"done\",phase=\"prepare\"}";
    assert!(String::from_utf8_lossy(&before).contains(&format!("{done} 0")), "{before:?}");
    let progress = Progress::new(("5f", "web1"), ("here", "there"), 0);
    site.api.migrations.metrics().count(&Report::empty(&progress, 1, Outcome::Done));
    assert_eq!(site.ask("GET", "/metrics", "").await, (200, before));
    site.api.metrics = CachedText::new(Duration::ZERO, ever);
    site.router = router(site.api.clone());
    let (_, after) = site.ask("GET", "/metrics", "").await;
    assert!(String::from_utf8_lossy(&after).contains(&format!("{done} 1")), "{after:?}");
}
