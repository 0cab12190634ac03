//! A writer that uses a whole CPU slows down with it. Needs root, and the CPU
//! controller of cgroups.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Hosts, Link};
use lab_guest::PAGE_BYTES;
use lab_guest::orders::Orders;

/// A quarter of a CPU for a process, until dropped.
struct Quarter(PathBuf);

impl Quarter {
    fn of(pid: u32) -> Self {
        let v1 = Path::new("/sys/fs/cgroup/cpu");
        let (root, quota) = if v1.is_dir() {
            (v1, vec![("cpu.cfs_period_us", "10000"), ("cpu.cfs_quota_us", "2500")])
        } else {
            let root = Path::new("/sys/fs/cgroup");
            // It may be enabled already.
            let _ = fs::write(root.join("cgroup.subtree_control"), "+cpu");
            (root, vec![("cpu.max", "2500 10000")])
        };
        let quarter = Self(root.join(format!("lab-burn-{}", std::process::id())));
        fs::create_dir(&quarter.0).unwrap();
        for (name, value) in quota {
            fs::write(quarter.0.join(name), value).unwrap();
        }
        fs::write(quarter.0.join("cgroup.procs"), pid.to_string()).unwrap();
        quarter
    }

    fn lift(self, pid: u32) {
        let parent = self.0.parent().unwrap();
        fs::write(parent.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Quarter {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

fn boot(hosts: &Hosts, vcpus: u32, orders: Orders) -> (Guest, Child) {
    let kit = lab::setup::ensure().unwrap();
    let spec = GuestSpec { vcpus, ..GuestSpec::new("g", "256M", orders) };
    let argv = spec.argv(&kit, &kit.qemu);
    let qemu = hosts.a.command(&argv[0]).args(&argv[1..]).stdin(Stdio::null()).spawn().unwrap();
    (Guest::meet(spec, &hosts.a).unwrap(), qemu)
}

/// Seconds of CPU that the guest's vCPUs have used.
fn cpu_s(pid: u32) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let spent = threads.filter_map(|thread| {
        let stat = fs::read_to_string(thread.unwrap().path().join("stat")).ok()?;
        let (_, rest) = stat.split_once("(CPU ")?;
        let fields: Vec<&str> = rest.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks = |nth: usize| fields.get(nth)?.parse::<f64>().ok();
        Some((ticks(11)? + ticks(12)?) / 100.0)
    });
    spent.sum()
}

/// The guest's work during two seconds: seconds of CPU, and bytes written per second of CPU.
fn work(guest: &Guest, pid: u32) -> (f64, f64) {
    std::thread::sleep(Duration::from_millis(300));
    guest.forget_gap();
    let (from, before) = (Instant::now(), cpu_s(pid));
    std::thread::sleep(Duration::from_millis(2000));
    let (to, cpu_s) = (Instant::now(), cpu_s(pid) - before);
    let pages = guest.felt(from, to).pages_per_s * (to - from).as_secs_f64();
    (cpu_s, pages * PAGE_BYTES as f64 / cpu_s.max(0.01))
}

fn field(answer: &str, name: &str) -> u64 {
    let word = answer.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    word.unwrap().parse().unwrap()
}

#[test]
fn a_writer_slows_down_with_its_cpu_at_any_rate() {
    let hosts = Hosts::new(Link::unshaped()).unwrap();
    let orders = Orders { working_set_bytes: 32 << 20, burn: true, ..Orders::default() };
    let (guest, mut qemu) = boot(&hosts, 1, orders);
    let fastest = field(&guest.ask("status").unwrap(), "fastest");
    println!("fastest {:.1} MB/s", fastest as f64 / 1e6);
    for rate in [fastest / 50, fastest / 2] {
        guest.ask(&format!("rate {rate}")).unwrap();
        let (all_s, all) = work(&guest, qemu.id());
        let quarter = Quarter::of(qemu.id());
        let (quarter_s, slowed) = work(&guest, qemu.id());
        quarter.lift(qemu.id());
        println!("told {rate}: {all:.0} in each of {all_s:.2} s, {slowed:.0} of {quarter_s:.2} s");
        // A writer that keeps its rate by the clock would write several times as much per second of
        // CPU. Less is right: the guest's kernel then needs a larger share of the CPU.
        assert!(quarter_s < all_s, "{quarter_s} s of {all_s} s");
        assert!(0.0 < slowed && slowed < 2.0 * all, "{slowed} and {all} for {rate}");
    }
    let checked = guest.check().unwrap();
    assert!(checked.wrong == 0 && checked.pages > 0, "{checked:?}");
    drop(hosts);
    qemu.wait().unwrap();
}

#[test]
fn one_of_two_cpus_writes_and_the_other_computes() {
    let hosts = Hosts::new(Link::unshaped()).unwrap();
    let orders = Orders {
        working_set_bytes: 8 << 20,
        rate: 1 << 20,
        burn: true,
        writer_cpu: 2,
        compute_cpu: 1,
        ..Orders::default()
    };
    let (guest, mut qemu) = boot(&hosts, 2, orders);
    let before = guest.ask("status").unwrap();
    guest.wait_beat(Duration::from_secs(5)).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let after = guest.ask("status").unwrap();
    for name in ["written", "computed"] {
        assert!(field(&after, name) > field(&before, name), "{name}: {before}; {after}");
    }
    drop(hosts);
    qemu.wait().unwrap();
}
