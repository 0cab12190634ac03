//! Gives VMs another QEMU, a few at a time, and reports how that went.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::process::ExitCode;
use std::task::Poll;

use api::{
    MigrationStarted, Outcome, PlanUpgradeRequest, Progress, Report, UpgradeHow, UpgradePlan,
    UpgradeRequest,
};
use client::{Client, Operation, Problem, segment};
use hyper::Method;
use report::amount;
use tokio::sync::watch;

use super::{NONE, plan};
use crate::output::{eprint_line, print_json, print_line};
use crate::watch::{Signals, last, leave_upgrading};

const CANCELLING: &str = "Cancelling: VMs that have not got it stay in the QEMU that they have. \
                          Ctrl-C again: don't wait.";

/// The VMs of one command.
pub(super) struct Upgrades<'c> {
    client: &'c Client,
    request: UpgradeRequest,
    json: bool,
    count: usize,
    /// Those that nothing was done for yet.
    waiting: RefCell<VecDeque<String>>,
    reports: RefCell<Vec<Report>>,
    /// The VMs that have not got it.
    failed: RefCell<Vec<String>>,
    /// Whether the user has cancelled the command.
    cancelled: watch::Sender<bool>,
}

impl<'c> Upgrades<'c> {
    pub(super) fn new(
        client: &'c Client,
        names: Vec<String>,
        request: UpgradeRequest,
        json: bool,
    ) -> Self {
        Self {
            client,
            request,
            json,
            count: names.len(),
            waiting: RefCell::new(names.into()),
            reports: RefCell::default(),
            failed: RefCell::default(),
            cancelled: watch::Sender::new(false),
        }
    }

    /// Does all of them, `parallel` at the same time.
    pub(super) async fn run(self, parallel: u16) -> Result<ExitCode, Problem> {
        if self.count == 0 && !self.json {
            print_line(format_args!("{NONE}"))?;
        }
        let mut signals = Signals::new()?;
        {
            let workers = usize::from(parallel).min(self.count);
            let mut workers = pin!(together((0..workers).map(|_| self.work()).collect()));
            loop {
                tokio::select! {
                    biased;
                    () = signals.next() => {
                        // The first one before.
                        if self.cancelled.send_replace(true) {
                            return Ok(leave_upgrading());
                        }
                        eprint_line(format_args!("{CANCELLING}"));
                    }
                    () = workers.as_mut() => break,
                }
            }
        }
        if self.json {
            print_json(&*self.reports.borrow())?;
        }
        let failed = self.failed.borrow();
        if failed.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        if self.count > 1 {
            let (some, all) = (failed.len(), self.count);
            let names = failed.join(", ");
            eprint_line(format_args!("droveway: {some} of {all} VMs have not got it: {names}"));
        }
        Ok(ExitCode::FAILURE)
    }

    /// Does one VM after the other.
    async fn work(&self) {
        loop {
            let next = self.waiting.borrow_mut().pop_front();
            let Some(name) = next else { return };
            match self.upgrade(&name).await {
                Ok(said) if self.json => eprint_line(format_args!("{said}")),
                Ok(said) => {
                    // The reader may have disconnected; the VMs get it all the same.
                    let _ = print_line(format_args!("{said}"));
                }
                Err(problem) => {
                    eprint_line(format_args!("droveway: {name}: {problem}"));
                    self.failed.borrow_mut().push(name);
                }
            }
        }
    }

    /// Gives one VM another QEMU; returns the line about it.
    async fn upgrade(&self, name: &str) -> Result<String, Problem> {
        if self.is_cancelled() {
            return Err(Problem::Refused("cancelled before it started".to_owned()));
        }
        let request = PlanUpgradeRequest { program: self.request.program.clone() };
        let plan = plan(self.client, name, &request).await?;
        if plan.already {
            return Ok(format!("{name} runs on that program already: QEMU {}.", plan.qemu));
        }
        if plan.how == UpgradeHow::Not {
            let reasons = plan.reasons.join("; ");
            return Err(Problem::Refused(format!("it can't get another QEMU: {reasons}")));
        }
        let path = format!("/v1/vms/{}/upgrade", segment(name));
        let asking = self.client.request(Method::POST, &path, Some(&self.request));
        let MigrationStarted { id } = asking.await?;
        eprint_line(format_args!("Migration {id}: {name} gets QEMU {}.", plan.version));
        let operation = Operation::Migration(id);
        let ended = self.ended(name, &operation).await?;
        let path = format!("{}/report", operation.path());
        let report: Result<Report, Problem> = self.client.get(&path).await;
        let said = told(&plan, &ended, report.as_ref().ok());
        self.reports.borrow_mut().extend(report);
        said
    }

    /// Waits for the end of a migration, which is cancelled with the command.
    async fn ended(&self, name: &str, operation: &Operation) -> Result<Progress, Problem> {
        let path = operation.path();
        let is_over = |progress: &Progress| progress.outcome.is_some();
        let mut ended = pin!(last(self.client, &path, is_over));
        tokio::select! {
            ended = ended.as_mut() => return ended,
            () = self.cancelling() => {}
        }
        // Past the point of no return, it gets it.
        if let Err(problem) = self.client.cancel(&path).await {
            eprint_line(format_args!("{name} is not cancelled: {problem}"));
        }
        ended.await
    }

    fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }

    /// Waits until the user cancels the command.
    async fn cancelling(&self) {
        let mut cancelled = self.cancelled.subscribe();
        // It fails when the sender is dropped, which is here.
        let _ = cancelled.wait_for(|is| *is).await;
    }
}

/// The line about one VM at its end.
fn told(plan: &UpgradePlan, ended: &Progress, report: Option<&Report>) -> Result<String, Problem> {
    match &ended.outcome {
        Some(Outcome::Done) => {}
        Some(Outcome::Failed(why)) if ended.in_doubt => {
            return Err(Problem::Refused(format!("it is in doubt: {why}")));
        }
        Some(Outcome::Failed(why)) => return Err(Problem::Refused(why.clone())),
        Some(Outcome::Cancelled) | None => {
            return Err(Problem::Refused("cancelled; it stays in its former QEMU".to_owned()));
        }
    }
    let UpgradePlan { vm, qemu, version, .. } = plan;
    let how = match plan.how {
        UpgradeHow::HandedOver => "handed over",
        UpgradeHow::Copied | UpgradeHow::Not => "copied",
    };
    let Some(report) = report else {
        return Ok(format!("{vm} has QEMU {version}, before {qemu}: {how}."));
    };
    let downtime = report.downtime_ms.map_or_else(
        || "paused as it was".to_owned(),
        |ms| format!("downtime {}", amount::milliseconds(ms)),
    );
    let total = amount::seconds(report.total_s);
    Ok(format!("{vm} has QEMU {version}, before {qemu}: {how} in {total}, {downtime}."))
}

/// Polls all of them until all have ended.
async fn together<F: Future<Output = ()>>(all: Vec<F>) {
    let mut all: Vec<_> = all.into_iter().map(Box::pin).collect();
    poll_fn(|context| {
        all.retain_mut(|one| one.as_mut().poll(context).is_pending());
        if all.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vm_has_one_line() {
        let plan = UpgradePlan {
            vm: "web1".to_owned(),
            qemu: "10.0.2".to_owned(),
            program: "qemu-system-x86_64".to_owned(),
            version: "11.1.3".to_owned(),
            already: false,
            how: UpgradeHow::Copied,
            copied_bytes: 1 << 30,
            reasons: Vec::new(),
        };
        let ended = |outcome| Progress { outcome: Some(outcome), ..Progress::default() };
        let report = Report { downtime_ms: Some(35.0), total_s: 2.0, ..Report::default() };
        let said = told(&plan, &ended(Outcome::Done), Some(&report)).unwrap();
        assert!(said.starts_with("web1 has QEMU 11.1.3, before 10.0.2: copied in 2"), "{said}");
        assert!(said.contains("downtime 35"), "{said}");
        assert_eq!(
            told(&plan, &ended(Outcome::Done), None).unwrap(),
            "web1 has QEMU 11.1.3, before 10.0.2: copied."
        );
        let failed = ended(Outcome::Failed("no room".to_owned()));
        assert!(told(&plan, &failed, None).unwrap_err().to_string().contains("no room"));
        let doubt = Progress { in_doubt: true, ..failed };
        assert!(told(&plan, &doubt, None).unwrap_err().to_string().contains("in doubt: no room"));
        let cancelled = told(&plan, &ended(Outcome::Cancelled), None).unwrap_err();
        assert!(cancelled.to_string().contains("its former QEMU"));
    }

    #[tokio::test]
    async fn all_are_waited_for() {
        let left = RefCell::new(3);
        let one = || async {
            tokio::task::yield_now().await;
            *left.borrow_mut() -= 1;
        };
        together(vec![one(), one(), one()]).await;
        assert_eq!(*left.borrow(), 0);
    }
}
