//! `resolve`: the operator decides which host a VM in doubt belongs to.

use std::io::{self, BufRead, IsTerminal, Write};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::{Client, Problem, segment};
use hyper::Method;
use report::vm::status;

use crate::output::{print, print_line};

/// The word to type, because a `y` is typed too easily.
const CERTAIN: &str = "certain";

#[derive(Debug, ClapArgs)]
pub(crate) struct ResolveArgs {
    /// The VM
    name: String,
    /// It continues here; you have made sure that it can't run on the other host
    #[arg(long, required_unless_present = "there", conflicts_with = "there")]
    here: bool,
    /// It belongs to the other host; what is left of it here is removed
    #[arg(long)]
    there: bool,
    /// Don't ask for confirmation: you have made sure
    #[arg(long)]
    yes: bool,
}

pub(crate) async fn run(client: &Client, args: &ResolveArgs) -> Result<ExitCode, Problem> {
    let path = format!("/v1/vms/{}", segment(&args.name));
    let vm: api::VmSummary = client.get(&path).await?;
    if !args.yes {
        confirm(&vm, args.here)?;
    }
    let side = if args.here { api::ResolveSide::Here } else { api::ResolveSide::There };
    let request = api::ResolveRequest { side, certain: true };
    let after: Option<api::VmSummary> =
        client.request(Method::POST, &format!("{path}/resolve"), Some(&request)).await?;
    let name = &args.name;
    let said = match (side, after) {
        (api::ResolveSide::There, None) => format!("{name} is removed here."),
        (_, Some(after)) => {
            let problem = after.problem.as_ref().map_or_else(String::new, |why| format!("\n{why}"));
            format!("{name} is {} here.{problem}", status(&after))
        }
        (api::ResolveSide::Here, None) => format!("{name} is resolved."),
    };
    print_line(format_args!("{said}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Explains what can't be undone, and asks for confirmation.
fn confirm(vm: &api::VmSummary, here: bool) -> Result<(), Problem> {
    let sure = if !here && vm.status == api::VmStatus::Unreadable {
        format!(
            "The record of {0} here will be removed; no QEMU is ended, and no image removed. Is it \
             certain that {0} doesn't run here?",
            vm.name
        )
    } else if here {
        format!(
            "If {0} runs on the other host, now or later, it runs twice, and its disks are \
             destroyed. Is it certain that it can't run there (host off, or cut off from its \
             storage)?",
            vm.name
        )
    } else {
        format!(
            "What is left of {0} here will be removed, which can't be undone. Is it certain that \
             {0} runs on the other host?",
            vm.name
        )
    };
    if !io::stdin().is_terminal() {
        return Err(Problem::Typed(format!("{sure} If so, use --yes")));
    }
    if let Some(problem) = &vm.problem {
        print_line(format_args!("{problem}\n"))?;
    }
    print(format_args!("{sure} Type `{CERTAIN}` if so: "))?;
    let local = |source| Problem::Local { what: "asking".to_owned(), source };
    // An answer counts only if the question was shown.
    io::stdout().flush().map_err(local)?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(local)?;
    if answer.trim() == CERTAIN {
        return Ok(());
    }
    Err(Problem::Typed("nothing was changed".to_owned()))
}
