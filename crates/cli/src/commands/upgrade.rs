//! `upgrade`: how VMs can get another QEMU on this host.

use std::process::ExitCode;

use api::{PlanUpgradeRequest, UpgradeHow, UpgradePlan};
use clap::Args as ClapArgs;
use client::{Client, Problem, segment};
use hyper::Method;
use report::{aligned, amount};

use crate::output::{print, print_json};

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
    /// Only print how each VM can get it. Required: this release can't do more
    #[arg(long, required = true)]
    dry_run: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(client: &Client, args: UpgradeArgs) -> Result<ExitCode, Problem> {
    debug_assert!(args.dry_run, "clap requires it");
    let names = if args.all {
        let vms: Vec<api::VmSummary> = client.get("/v1/vms").await?;
        let runs = |vm: &api::VmSummary| {
            matches!(vm.status, api::VmStatus::Running | api::VmStatus::Paused)
        };
        vms.into_iter().filter(runs).map(|vm| vm.name).collect()
    } else {
        args.names
    };
    let request = PlanUpgradeRequest { program: args.qemu };
    let mut plans: Vec<UpgradePlan> = Vec::new();
    for name in names {
        let path = format!("/v1/vms/{}/plan-upgrade", segment(&name));
        plans.push(client.ask(Method::POST, &path, Some(&request)).await?);
    }
    if args.json {
        print_json(&plans)?;
    } else {
        print(format_args!("{}", table(&plans)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(plans: &[UpgradePlan]) -> String {
    if plans.is_empty() {
        return "No VM runs here.\n".to_owned();
    }
    let mut rows = vec![["VM", "QEMU", "TO", "HOW"].map(str::to_owned)];
    for plan in plans {
        let how = match plan.how {
            UpgradeHow::HandedOver => "handed over: its RAM stays where it is".to_owned(),
            UpgradeHow::Copied => {
                format!("copied: needs {} more meanwhile", amount::size(plan.copied_bytes))
            }
            UpgradeHow::Not => "not".to_owned(),
        };
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
        let text = table(&[
            plan("web1", UpgradeHow::HandedOver, 0, &[]),
            plan("web2", UpgradeHow::Copied, 4 << 30, &[]),
            plan("web3", UpgradeHow::Not, 0, &["libvirt started it", "-vnc listens"]),
        ]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "web1  10.0.2  10.0.3  handed over: its RAM stays where it is");
        assert_eq!(lines[2], "web2  10.0.2  10.0.3  copied: needs 4.00 GiB more meanwhile");
        assert_eq!(lines[3], "web3  10.0.2  10.0.3  not");
        let last = ["web3 can't get another QEMU while it runs here:", "  libvirt started it"];
        assert_eq!(lines[5..7], last);
        assert_eq!(lines.len(), 8);
        assert!(table(&[]).contains("No VM"));
    }
}
