//! `run`: start a VM under this host's agent.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use hyper::Method;

use crate::client::Client;
use crate::output::vm::print_problem;
use crate::output::{amount, print_line};
use crate::problem::Problem;

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
    let free_page_hint = args.free_page_hint;
    let name = args.name;
    let request = api::RunRequest { name, argv, cwd, share_domain, guest_port, free_page_hint };
    let vm: api::VmSummary = client.ask(Method::POST, "/v1/vms", Some(&request)).await?;
    print_line(format_args!(
        "{} runs (QEMU {}, {} of RAM).",
        vm.name,
        vm.qemu,
        amount::size(vm.ram_bytes)
    ))?;
    print_problem(&vm);
    Ok(ExitCode::SUCCESS)
}
