//! `upgrade`: another QEMU for VMs on this host.

mod each;

use std::collections::BTreeSet;
use std::process::ExitCode;

use api::{Audit, PlanUpgradeRequest, UpgradeHow, UpgradePlan, UpgradeRequest};
use clap::Args as ClapArgs;
use client::{Client, Problem, segment};
use hyper::Method;
use report::{aligned, amount};

use crate::options::words::{self, one_of};
use crate::output::{print, print_json};
use each::Upgrades;

#[derive(Debug, ClapArgs)]
pub(crate) struct UpgradeArgs {
    /// The VMs
    #[arg(required_unless_present = "all", conflicts_with = "all", value_name = "VM")]
    names: Vec<String>,
    /// All VMs of this host
    #[arg(long)]
    all: bool,
    /// The other QEMU's program [default: the one that the VM's command line names, as it is on
    /// disk now]
    #[arg(long, value_name = "PROGRAM")]
    qemu: Option<String>,
    /// How many VMs get it at the same time
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u16).range(1..))]
    parallel: u16,
    /// Only print how each VM can get it
    #[arg(long)]
    dry_run: bool,
    /// What is compared before a VM's former QEMU releases it [default: on]
    #[arg(long, value_parser = one_of::<Audit>(words::AUDIT))]
    audit: Option<Audit>,
    /// Also VMs whose QEMU loses writes of the guest meanwhile: one older than 9.0, under TCG
    #[arg(long)]
    accept_lost_writes: bool,
    /// Print JSON on standard output, and nothing else there: the plans, or the reports
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(client: &Client, args: UpgradeArgs) -> Result<ExitCode, Problem> {
    let names = names(client, &args).await?;
    if args.dry_run {
        return dry_run(client, &names, args).await;
    }
    let request = UpgradeRequest {
        program: args.qemu,
        audit: args.audit.unwrap_or_default(),
        accept_lost_writes: args.accept_lost_writes,
    };
    Upgrades::new(client, names, request, args.json).run(args.parallel).await
}

/// The VMs, each once.
async fn names(client: &Client, args: &UpgradeArgs) -> Result<Vec<String>, Problem> {
    if args.all {
        let vms: Vec<api::VmSummary> = client.get("/v1/vms").await?;
        let runs = |vm: &api::VmSummary| {
            matches!(vm.status, api::VmStatus::Running | api::VmStatus::Paused)
        };
        return Ok(vms.into_iter().filter(runs).map(|vm| vm.name).collect());
    }
    let mut seen = BTreeSet::new();
    Ok(args.names.iter().filter(|name| seen.insert(*name)).cloned().collect())
}

async fn dry_run(
    client: &Client,
    names: &[String],
    args: UpgradeArgs,
) -> Result<ExitCode, Problem> {
    let request = PlanUpgradeRequest { program: args.qemu };
    let mut plans = Vec::new();
    for name in names {
        plans.push(plan(client, name, &request).await?);
    }
    if args.json {
        print_json(&plans)?;
    } else {
        print(format_args!("{}", table(&plans)))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn plan(
    client: &Client,
    name: &str,
    request: &PlanUpgradeRequest,
) -> Result<UpgradePlan, Problem> {
    let path = format!("/v1/vms/{}/plan-upgrade", segment(name));
    client.request(Method::POST, &path, Some(request)).await
}

/// Where there is nothing to do.
const NONE: &str = "No VM runs here.";

fn table(plans: &[UpgradePlan]) -> String {
    if plans.is_empty() {
        return format!("{NONE}\n");
    }
    let mut rows = vec![["VM", "QEMU", "TO", "HOW"].map(str::to_owned)];
    for plan in plans {
        let mut how = match plan.how {
            UpgradeHow::HandedOver => "handed over: its RAM stays where it is".to_owned(),
            UpgradeHow::Copied => {
                format!("copied: needs up to {} more meanwhile", amount::size(plan.copied_bytes))
            }
            UpgradeHow::Not => "not".to_owned(),
        };
        if plan.already {
            how += "; it runs on that program already";
        }
        rows.push([plan.vm.clone(), plan.qemu.clone(), plan.version.clone(), how]);
    }
    let mut out = aligned(&rows);
    for plan in plans.iter().filter(|plan| plan.how == UpgradeHow::Not) {
        out += &format!("\n{} can't get another QEMU while it runs here:\n", plan.vm);
        for reason in &plan.reasons {
            out += &format!("  {reason}\n");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(vm: &str, how: UpgradeHow, copied_bytes: u64, reasons: &[&str]) -> UpgradePlan {
        UpgradePlan {
            vm: vm.to_owned(),
            qemu: "10.0.2".to_owned(),
            program: "qemu-system-x86_64".to_owned(),
            version: "10.0.3".to_owned(),
            already: false,
            how,
            copied_bytes,
            reasons: reasons.iter().map(|reason| (*reason).to_owned()).collect(),
        }
    }

    #[test]
    fn each_vm_has_a_line_and_each_obstacle() {
        let same = UpgradePlan { already: true, ..plan("web4", UpgradeHow::HandedOver, 0, &[]) };
        let text = table(&[
            plan("web1", UpgradeHow::HandedOver, 0, &[]),
            plan("web2", UpgradeHow::Copied, 4 << 30, &[]),
            plan("web3", UpgradeHow::Not, 0, &["libvirt started it", "-vnc listens"]),
            same,
        ]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "web1  10.0.2  10.0.3  handed over: its RAM stays where it is");
        assert_eq!(lines[2], "web2  10.0.2  10.0.3  copied: needs up to 4.00 GiB more meanwhile");
        assert_eq!(lines[3], "web3  10.0.2  10.0.3  not");
        assert!(lines[4].ends_with("where it is; it runs on that program already"));
        let last = ["web3 can't get another QEMU while it runs here:", "  libvirt started it"];
        assert_eq!(lines[6..8], last);
        assert_eq!(lines.len(), 9);
        assert!(table(&[]).contains("No VM"));
    }
}
