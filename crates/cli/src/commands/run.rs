//! `run`: start a VM under this host's agent.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::{Client, Problem};
use hyper::Method;
use report::amount;
use report::vm::status;

use crate::output::print_line;
use crate::output::vm::print_problem;

#[derive(Debug, ClapArgs)]
pub(crate) struct RunArgs {
    /// The VM's name
    pub(crate) name: String,
    /// Its sharing domain. VMs of one domain share content when they move, so the
    /// duration of a move can reveal that another VM has the same content; VMs of
    /// different domains share nothing [default: the cluster's default domain]
    #[arg(long, value_name = "LABEL", default_value = "", hide_default_value = true)]
    pub(crate) share_domain: String,
    /// Don't add the port for the guest helper
    #[arg(long)]
    pub(crate) no_guest_port: bool,
    /// Add a balloon device by which the guest reports free memory, which QEMU leaves out of a
    /// migration. Only for guests whose kernel has init_on_alloc=0
    #[arg(long)]
    pub(crate) free_page_hint: bool,
    /// Put all RAM into shared memory that another QEMU on its host can map, so that it need not be
    /// copied when the VM gets one. Shared memory has huge pages only where the host is set up for
    /// them
    #[arg(long)]
    pub(crate) hand_over: bool,
    /// QEMU and its arguments
    #[arg(last = true, required = true, value_name = "QEMU ARGS")]
    pub(crate) argv: Vec<OsString>,
}

pub(crate) async fn run(client: &Client, args: RunArgs) -> Result<ExitCode, Problem> {
    let mut argv = Vec::with_capacity(args.argv.len());
    for arg in args.argv {
        argv.push(arg.into_string().map_err(|arg| {
            Problem::Typed(format!("the argument {} is not UTF-8", arg.to_string_lossy()))
        })?);
    }
    let cwd = std::env::current_dir()
        .map_err(|source| Problem::Local { what: "finding this directory".to_owned(), source })?;
    let cwd = cwd
        .into_os_string()
        .into_string()
        .map_err(|_| Problem::Typed("the name of this directory is not UTF-8".to_owned()))?;
    let share_domain = args.share_domain;
    let guest_port = !args.no_guest_port;
    let (free_page_hint, hand_over) = (args.free_page_hint, args.hand_over);
    let name = args.name;
    let request =
        api::RunRequest { name, argv, cwd, share_domain, guest_port, free_page_hint, hand_over };
    let vm: api::VmSummary = client.request(Method::POST, "/v1/vms", Some(&request)).await?;
    print_line(format_args!("{}", started(&vm)))?;
    print_problem(&vm);
    Ok(ExitCode::SUCCESS)
}

/// What became of it: with `-S` it is paused, and its guest may end at once.
fn started(vm: &api::VmSummary) -> String {
    let state = match vm.status {
        api::VmStatus::Running => "runs".to_owned(),
        _ => format!("is {}", status(vm)),
    };
    format!("{} {state} (QEMU {}, {} of RAM).", vm.name, vm.qemu, amount::size(vm.ram_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::vm::example;

    #[test]
    fn a_vm_that_is_paused_is_not_said_to_run() {
        assert_eq!(started(&example("web1")), "web1 runs (QEMU 10.0.2, 1.00 GiB of RAM).");
        let paused = api::VmSummary { status: api::VmStatus::Paused, ..example("web1") };
        assert_eq!(started(&paused), "web1 is paused (QEMU 10.0.2, 1.00 GiB of RAM).");
    }
}
