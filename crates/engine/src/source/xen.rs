//! The source's side of a domain of Xen that `xl migrate` sends.
//!
//! ```text
//! offered     xl gets its banner from this agent, and sends the domain's configuration
//! prepare     the journal is opened; the destination's agent starts a receiver
//! first pass, the tap reads xl's pipe; pages go on lanes, all else by the control connection,
//! later pass  once the pages before it are placed
//! stopped     the tail has started: xl has suspended the domain
//! loaded      the receiver has the domain; xl gets "ready", and writes its permission
//! committed   journaled; the destination may run the domain
//! running     xl gets a report of success, and destroys its domain
//! ```
//!
//! The switchover's machine decides, as for VMs of QEMU: see
//! [`DepartingDomain`](crate::xen::DepartingDomain).

mod committed;
mod following;
mod leading;
mod passes;
mod sampling;
mod streaming;
mod tap;

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Outcome, SendDomain};
use managers::xen::MovingDomain;
use xen::handshake::Answer;
use xen::{Configuration, XL_HEADER_BYTES, configuration_bytes};

use crate::error::MigrationError;
use crate::host::{Local, Peer};
use crate::report_builder::ReportBuilder;
use crate::watch::Watch;
use crate::xen::XlPipes;
pub use leading::DepartedDomain;
use leading::Leading;

/// xl sends the configuration at once.
const OFFER_MAX: Duration = Duration::from_secs(30);

/// A domain that xl offers.
#[derive(Debug)]
pub struct OfferedDomain {
    pipes: XlPipes,
    /// What xl has sent: its header and the configuration.
    header: Vec<u8>,
    configuration: Configuration,
}

impl OfferedDomain {
    /// Has xl begin, and reads which domain it sends.
    ///
    /// # Errors
    /// If xl sends anything else; returns its pipes. The domain runs on.
    pub fn read(pipes: XlPipes) -> Result<Self, Box<(MigrationError, XlPipes)>> {
        match read_header(&pipes) {
            Ok((header, configuration)) => Ok(Self { pipes, header, configuration }),
            Err(error) => Err(Box::new((error, pipes))),
        }
    }

    /// The domain's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.configuration.name
    }

    /// The domain's UUID.
    #[must_use]
    pub fn uuid(&self) -> &str {
        &self.configuration.uuid
    }

    /// xl's pipes.
    #[must_use]
    pub fn pipes(&self) -> &XlPipes {
        &self.pipes
    }

    /// Sends it to `peer`. Blocks until the end; `watch` shows the progress, and `began` is called
    /// with the switchover's id once this agent has its journal.
    #[must_use]
    pub fn send(
        self,
        local: &Local,
        peer: &Peer,
        request: &SendDomain,
        watch: &Arc<Watch>,
        began: &dyn Fn(&XlPipes, &str),
    ) -> DepartedDomain {
        let report_builder = Arc::new(ReportBuilder::new(Arc::clone(watch), request.downtime_ms));
        report_builder.update(|report| report.tap = "xl".to_owned());
        watch.update(|progress| progress.by_xl = true);
        let Self { pipes, header, configuration } = self;
        let pipes = Arc::new(pipes);
        let domain =
            MovingDomain { name: configuration.name.clone(), uuid: configuration.uuid.clone() };
        let leading = Leading::open(local, peer, request, &report_builder, domain, &pipes);
        let leading = match leading {
            Ok(leading) => leading,
            Err(error) => {
                pipes.ended(false, &format!("{} stays here: {error}", configuration.name));
                let report = report_builder.end(Outcome::Failed(error.to_string()));
                return DepartedDomain { report, unsettled: None };
            }
        };
        began(&pipes, leading.switchover());
        leading.send(pipes, &header, &configuration)
    }
}

fn read_header(pipes: &XlPipes) -> Result<(Vec<u8>, Configuration), MigrationError> {
    let reading = |error| MigrationError::Xl(format!("reading its configuration: {error}"));
    let until = Instant::now() + OFFER_MAX;
    pipes.write(Answer::Banner).map_err(reading)?;
    let mut head = [0; XL_HEADER_BYTES];
    pipes.read_exact(&mut head, until).map_err(reading)?;
    let bytes = configuration_bytes(&head)?;
    let mut header = vec![0; XL_HEADER_BYTES + bytes];
    let (first, data) = header.split_at_mut(XL_HEADER_BYTES);
    first.copy_from_slice(&head);
    pipes.read_exact(data, until).map_err(reading)?;
    let configuration = Configuration::parse(data)?;
    Ok((header, configuration))
}
