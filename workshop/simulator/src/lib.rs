//! Gangs of many VMs on many hosts in simulated time: what sharing content would save at sizes that
//! no lab reaches. The agents' policy decides which VMs may begin and, if requested, where they go;
//! the agents' directory knows where content is. VMs are traces of what they contain, and links
//! divide their capacity as TCP does. There is no QEMU: CPU time, its own and all other, is given
//! per byte.

mod content;
mod cores;
mod gang;
mod ground;
mod links;
mod pace;
mod placement;
mod share;
mod trace;
mod vm;

use std::path::{Path, PathBuf};

use clap::Args;

pub use cores::{Costs, Machines};
pub use gang::{Outcome, run};
pub use ground::Ground;
pub use pace::Pace;
pub use placement::Placement;
pub use share::Share;
pub use trace::{Mix, Trace, TracedVm};

use lab::error::{FileContext, LabError, Result};

const MIB: u64 = 1 << 20;
const HOSTS_MAX: usize = 1000;
/// The most VMs.
pub const VMS_MAX: usize = 10_000;
/// Length of a step: nothing that matters can happen within it.
const STEP_S: f64 = 0.02;
/// Cores of the lab's machine, less the time that no process gets: interrupts, and steal.
const LAB_CORES: f64 = 1.75;
/// The system of the lab's guests: what two have in common, and what each has besides.
const LAB_SYSTEM: u64 = 34 * MIB;
const LAB_OWN: u64 = 4 * MIB;

/// What is simulated.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// As the lab's gang benchmarks: two source racks and one target rack of two
    /// hosts each, edges of 250 Mbit/s, a core of 1 Gbit/s, 8 VMs of which each has
    /// the system, 32 MiB that all have and 16 MiB of its own, all at once, and all
    /// hosts on one machine
    #[arg(long)]
    like_lab: bool,
    /// How far content is shared [default: off, host and rack, one after the other]
    #[arg(long, value_enum)]
    share: Vec<Share>,
    /// VMs that move
    #[arg(long, default_value_t = 1000)]
    vms: usize,
    /// VMs of the same kind that run at the target hosts already
    #[arg(long, default_value_t = 0)]
    residents: usize,
    /// Racks that VMs leave
    #[arg(long, default_value_t = 5)]
    source_racks: usize,
    /// Hosts in each of them
    #[arg(long, default_value_t = 10)]
    source_hosts: usize,
    /// Racks that VMs go to
    #[arg(long, default_value_t = 5)]
    target_racks: usize,
    /// Hosts in each of them
    #[arg(long, default_value_t = 10)]
    target_hosts: usize,
    /// What a host's edge carries each way, in Mbit/s
    #[arg(long, default_value_t = 10_000.0)]
    edge: f64,
    /// What a rack's link to the core carries each way, in Mbit/s
    #[arg(long, default_value_t = 40_000.0)]
    core: f64,
    /// How many leave a host, and arrive at one, at a time
    #[arg(long, default_value_t = 2)]
    parallel: usize,
    /// How their hosts are chosen: by the agents' policy, or in turn
    #[arg(long, value_enum, default_value_t = Placement::Turn)]
    placement: Placement,
    /// How many systems the VMs have
    #[arg(long, default_value_t = 1)]
    systems: usize,
    /// What a VM's system has in memory, in MiB
    #[arg(long, default_value_t = 512)]
    system: u64,
    /// What all VMs have in common besides, in MiB
    #[arg(long, default_value_t = 256)]
    common: u64,
    /// What of a VM is one and the same page, in MiB
    #[arg(long, default_value_t = 0)]
    repeated: u64,
    /// What each VM has alone, in MiB
    #[arg(long, default_value_t = 1024)]
    own: u64,
    /// What each VM writes, in MB/s
    #[arg(long, default_value_t = 0)]
    dirty: u64,
    /// To how much of its memory, in MiB
    #[arg(long, default_value_t = 64)]
    working_set: u64,
    /// What VMs contain, instead: a file {grain_bytes, vms: [{contents}]}; used again
    /// from the first one on where more move
    #[arg(long, value_name = "FILE", conflicts_with_all = ["system", "common", "own"])]
    trace: Option<PathBuf>,
    /// Cores of each host, or of the machine that the lab is [default: nothing waits for
    /// one; of the lab 2, less what it takes itself]
    #[arg(long, value_name = "NUMBER")]
    cores: Option<f64>,
    /// What work takes of them, as far as it is given here: a file {hand_over_ns,
    /// tap_ns, name_ns, encode_ns, place_ns, find_ns, wire_ns, start_s, vm_cores,
    /// vcpu_cores, moving_cores}
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Say instead how far off it is from what the lab measured: results of gang-idle;
    /// may be repeated
    #[arg(long, value_name = "FILE", requires_all = ["like_lab", "trace"])]
    against: Vec<PathBuf>,
    /// Pages are sent as they are, also where the trace says how they shrink
    #[arg(long)]
    uncompressed: bool,
    /// What a migration's buffers hold, in MiB
    #[arg(long, default_value_t = 8)]
    pool: u64,
    /// What a host can hash of the VMs that leave it, in MB/s
    #[arg(long, default_value_t = 2000.0)]
    naming: f64,
    /// What QEMU hands over of one VM at most, in MB/s
    #[arg(long, default_value_t = 2000.0)]
    vm_rate: f64,
    /// From a VM's turn to its first page, in seconds
    #[arg(long, default_value_t = 0.6)]
    prepare: f64,
    /// From its last page to its running, in seconds
    #[arg(long, default_value_t = 0.15)]
    switchover: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Options {
    /// Runs the simulation, and prints its outcome. `compare` describes how far off it is from what a
    /// file says that the lab measured.
    ///
    /// # Errors
    /// If the options or the files that they name are wrong.
    pub fn run(&self, compare: fn(&Path, &Pace, &Trace) -> Result<String>) -> Result<()> {
        let (ground, mix) = (self.ground(), self.mix());
        let pace = self.pace(self.costs()?);
        self.check(&ground, &pace)?;
        let all = mix.vms;
        let mut trace = match &self.trace {
            Some(path) => Trace::read(path)?.repeated(all),
            None => mix.trace(),
        };
        if self.uncompressed {
            trace.encoded_bytes.clear();
        }
        for path in &self.against {
            let name = path.file_stem().unwrap_or_default().display();
            println!("`{name}`:\n\n{}", compare(path, &pace, &trace)?);
        }
        if !self.against.is_empty() {
            return Ok(());
        }
        let every = [Share::Off, Share::Host, Share::Rack];
        let shares = if self.share.is_empty() { &every[..] } else { &self.share };
        let run = |share: &Share| run(*share, &ground, &pace, &trace, self.residents);
        let outcomes: Vec<Outcome> = shares.iter().map(run).collect::<Result<_>>()?;
        if self.json {
            let text = serde_json::to_string_pretty(&outcomes);
            println!("{}", text.map_err(|error| LabError::Unsupported(error.to_string()))?);
        } else {
            print!("{}", table(&outcomes));
        }
        Ok(())
    }

    fn ground(&self) -> Ground {
        if self.like_lab {
            return Ground::like_lab();
        }
        Ground {
            source_racks: self.source_racks,
            source_hosts: self.source_hosts,
            target_racks: self.target_racks,
            target_hosts: self.target_hosts,
            edge_bits_per_s: self.edge * 1e6,
            core_bits_per_s: self.core * 1e6,
        }
    }

    /// The VMs that move, and the residents.
    fn mix(&self) -> Mix {
        if self.like_lab {
            return Mix {
                vms: 8 + self.residents,
                systems: 1,
                system_bytes: LAB_SYSTEM,
                common_bytes: 32 * MIB,
                repeated_bytes: 0,
                own_bytes: 16 * MIB + LAB_OWN,
                dirty_bytes_per_s: 0,
                working_set_bytes: 0,
            };
        }
        Mix {
            vms: self.vms.saturating_add(self.residents),
            systems: self.systems,
            system_bytes: self.system.saturating_mul(MIB),
            common_bytes: self.common.saturating_mul(MIB),
            repeated_bytes: self.repeated.saturating_mul(MIB),
            own_bytes: self.own.saturating_mul(MIB),
            dirty_bytes_per_s: self.dirty.saturating_mul(1_000_000),
            working_set_bytes: self.working_set.saturating_mul(MIB),
        }
    }

    fn costs(&self) -> Result<Costs> {
        let Some(path) = &self.costs else { return Ok(Costs::default()) };
        let text = std::fs::read(path).at("read", path)?;
        serde_json::from_slice(&text)
            .map_err(|error| LabError::Unsupported(format!("{}: {error}", path.display())))
    }

    fn machines(&self) -> Machines {
        match self.cores {
            None if self.like_lab => Machines::One(LAB_CORES),
            None => Machines::Unlimited,
            Some(cores) if self.like_lab => Machines::One(cores),
            Some(cores) => Machines::Each(cores),
        }
    }

    fn pace(&self, costs: Costs) -> Pace {
        Pace {
            parallel: if self.like_lab { policy::gang::PARALLEL_MAX } else { self.parallel },
            placement: self.placement,
            prepare_s: self.prepare,
            switchover_s: self.switchover,
            goal_s: 0.3,
            pool_bytes: (self.pool * MIB) as f64,
            naming_bytes_per_s: self.naming * 1e6,
            vm_bytes_per_s: self.vm_rate * 1e6,
            step_s: if self.like_lab { STEP_S / 4.0 } else { STEP_S },
            machines: self.machines(),
            costs,
        }
    }

    fn check(&self, ground: &Ground, pace: &Pace) -> Result<()> {
        let wrong = |what: &str| Err(LabError::Unsupported(what.to_owned()));
        let racks = [ground.source_racks, ground.target_racks];
        let hosts = [ground.source_hosts, ground.target_hosts];
        let all = racks.iter().zip(hosts).map(|(racks, hosts)| racks.saturating_mul(hosts));
        if racks.contains(&0) || hosts.contains(&0) || all.sum::<usize>() > HOSTS_MAX {
            return wrong("there have to be racks, hosts in each, and 1,000 hosts at most");
        }
        if self.vms == 0 || self.vms.saturating_add(self.residents) > VMS_MAX {
            return wrong("there have to be VMs, and 10,000 at most");
        }
        let rates = [
            ground.edge_bits_per_s,
            ground.core_bits_per_s,
            pace.naming_bytes_per_s,
            pace.vm_bytes_per_s,
            pace.pool_bytes,
            self.cores.unwrap_or(1.0),
        ];
        let times = [pace.prepare_s, pace.switchover_s];
        let right = rates.iter().all(|rate| rate.is_finite() && *rate > 0.0)
            && times.iter().all(|time| (0.0..=3600.0).contains(time))
            && pace.costs.are_right();
        if right {
            return Ok(());
        }
        wrong("rates and cores have to be above 0, times up to an hour, costs not below 0")
    }
}

/// The outcomes as a Markdown table.
fn table(outcomes: &[Outcome]) -> String {
    let heads = [
        "share",
        "total s",
        "CPU s",
        "core MB",
        "bodies MB",
        "named MB",
        "peers MB",
        "again MB",
        "asked",
    ];
    let rule = heads.map(|_| "---");
    let mut out = format!("| {} |\n| {} |\n", heads.join(" | "), rule.join(" | "));
    let mb = |bytes: f64| format!("{:.1}", bytes / 1e6);
    for one in outcomes {
        let again: Vec<String> =
            one.rack_duplicate_bytes.iter().map(|bytes| mb(*bytes as f64)).collect();
        let row = [
            one.share.to_string(),
            one.total_s.map_or_else(|| "more than a day".to_owned(), |s| format!("{s:.2}")),
            format!("{:.1}", one.cpu_s),
            mb(one.core_bytes),
            mb(one.body_bytes),
            mb(one.named_bytes),
            mb(one.peer_bytes),
            again.join(", "),
            one.lookups.to_string(),
        ];
        out += &format!("| {} |\n", row.join(" | "));
    }
    out + "\nAgain: for each target rack, what came to it though it had come before.\n"
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        options: Options,
    }

    fn typed(line: &str) -> Options {
        let words = std::iter::once("simulate").chain(line.split_whitespace());
        Typed::parse_from(words).options
    }

    #[test]
    fn what_cannot_be_simulated_is_refused() {
        let checked = |line: &str| {
            let options = typed(line);
            options.check(&options.ground(), &options.pace(Costs::default()))
        };
        assert!(checked("").is_ok() && checked("--like-lab").is_ok());
        for line in [
            "--source-racks 0",
            "--target-hosts 0",
            "--source-hosts 300",
            "--vms 0",
            "--vms 10001",
            "--edge 0",
            "--core NaN",
            "--prepare=-1",
            "--pool 0",
            "--cores 0",
        ] {
            assert!(checked(line).is_err(), "{line}");
        }
    }

    #[test]
    fn outcomes_are_printed_as_a_table() {
        let outcome = Outcome {
            share: Share::Rack,
            total_s: Some(4.5),
            prepared_s: 0.6,
            cpu_s: 9.0,
            guests_cpu_s: 1.0,
            core_bytes: 2e6,
            body_bytes: 1e6,
            named_bytes: 7e6,
            peer_bytes: 5e5,
            rack_duplicate_bytes: vec![0, 100_000],
            lookups: 12,
        };
        let text = table(&[outcome]);
        assert!(
            text.contains("| rack | 4.50 | 9.0 | 2.0 | 1.0 | 7.0 | 0.5 | 0.0, 0.1 | 12 |"),
            "{text}"
        );
    }
}
