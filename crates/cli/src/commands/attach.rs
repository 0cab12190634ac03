//! `attach`: adopt a VM that was started outside of the agent.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::{Client, Problem};
use hyper::Method;
use report::vm::status;

use crate::output::print_line;
use crate::output::vm::print_problem;

#[derive(Debug, ClapArgs)]
pub(crate) struct AttachArgs {
    /// The name to give it
    name: String,
    /// Its QMP socket
    #[arg(long, value_name = "SOCKET")]
    qmp: PathBuf,
    /// Its sharing domain. VMs of one domain share content when they move, so the
    /// duration of a move can reveal that another VM has the same content; VMs of
    /// different domains share nothing [default: the cluster's default domain]
    #[arg(long, value_name = "LABEL", default_value = "", hide_default_value = true)]
    share_domain: String,
}

pub(crate) async fn run(client: &Client, args: AttachArgs) -> Result<ExitCode, Problem> {
    let qmp = std::path::absolute(&args.qmp)
        .map_err(|source| Problem::Local { what: "finding the QMP socket".to_owned(), source })?;
    let qmp = qmp
        .into_os_string()
        .into_string()
        .map_err(|_| Problem::Typed("the name of the QMP socket is not UTF-8".to_owned()))?;
    let share_domain = args.share_domain;
    let request = api::AttachRequest { name: args.name, qmp, share_domain };
    let vm: api::VmSummary = client.request(Method::POST, "/v1/vms/attach", Some(&request)).await?;
    print_line(format_args!("{} is adopted (QEMU {}, {}).", vm.name, vm.qemu, status(&vm)))?;
    print_problem(&vm);
    Ok(ExitCode::SUCCESS)
}
