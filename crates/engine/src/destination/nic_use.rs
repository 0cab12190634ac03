//! Once a second, sends the source the traffic of this host's NICs, to pace its lanes by, and the
//! operator's settings that the system refuses here.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select, tick};
use data_threads::Joined;
use policy::pace::DestinationUse;
use wire::ToSource;

use super::lanes::ArrivingLanes;
use crate::error::LinkError;
use crate::link::Link;
use crate::network::Way;

const EVERY: Duration = Duration::from_secs(1);

/// The thread that reports to the source. Ends when this is dropped.
pub(super) struct NicReports {
    _stop: Sender<()>,
    _thread: Joined,
}

impl NicReports {
    pub(super) fn start(
        lanes: &Arc<ArrivingLanes>,
        link: &Arc<Link<ToSource>>,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = bounded(0);
        let (lanes, link) = (Arc::clone(lanes), Arc::clone(link));
        let thread = data_threads::spawn("nic-use", move || report(&lanes, &link, &stopped))?;
        Ok(Self { _stop: stop, _thread: thread.into() })
    }
}

fn report(lanes: &ArrivingLanes, link: &Link<ToSource>, stopped: &Receiver<()>) {
    let ticks = tick(EVERY);
    loop {
        select! {
            recv(ticks) -> _ => {
                lanes.trim();
                if report_once(lanes, link).is_err() {
                    return; // The connection is lost, which the leading thread notices.
                }
            }
            recv(stopped) -> _ => {
                let _ = report_refusals(lanes, link);
                return;
            }
        }
    }
}

fn report_once(lanes: &ArrivingLanes, link: &Link<ToSource>) -> Result<(), LinkError> {
    report_refusals(lanes, link)?;
    match lanes.network.uses(Way::In) {
        Ok(nics) => link.send(&ToSource::NicUse(DestinationUse { nics, lanes: lanes.places() })),
        Err(error) => {
            tracing::warn!(%error, "the network cards' counters can't be read");
            Ok(())
        }
    }
}

fn report_refusals(lanes: &ArrivingLanes, link: &Link<ToSource>) -> Result<(), LinkError> {
    for refused in lanes.threads().refused() {
        link.send(&ToSource::Note { text: format!("at the destination {refused}") })?;
    }
    Ok(())
}
