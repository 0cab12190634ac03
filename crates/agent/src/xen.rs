//! Domains of Xen, which are no VMs of the agent's: those that `xl` migrates from here, and
//! switchovers that are not settled, on either side.

mod case;
mod handed_over;
mod listener;
mod settler;
mod settlers;

pub(crate) use listener::DomainListener;
pub(crate) use settlers::DomainSettlers;
