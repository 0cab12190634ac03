//! `predict`: the prediction of a migration, as text.

use std::process::ExitCode;

use api::{BitRate, FreeMemory, OnStall, Outlook, PredictRequest, Prediction, Slowing, Throttle};
use clap::Args as ClapArgs;
use client::{Client, Problem, segment};
use hyper::Method;
use report::amount;

use crate::options::words::{self, one_of};
use crate::output::{print_json, print_line};

/// Less unused memory than this makes no difference.
const SHARED_LEAST: u64 = 256 << 20;

#[derive(Debug, ClapArgs)]
pub(crate) struct PredictArgs {
    /// The VM
    name: String,
    /// The host to move it to
    host: String,
    /// The downtime goal, in milliseconds
    #[arg(long, value_name = "N", default_value_t = 300,
          value_parser = clap::value_parser!(u64).range(1..=60_000))]
    downtime_ms: u64,
    /// The bandwidth that the migration can have, in bits per second, such as 200M
    /// [default: what this host's network cards carry]
    #[arg(long, value_name = "RATE")]
    rate: Option<BitRate>,
    /// Whether a VM that writes faster than its memory can be sent is throttled:
    /// auto, as far as needed; off; or so that it dirties this share of what can be
    /// delivered, such as 0.7
    #[arg(long, value_name = "auto|off|C", default_value_t = Throttle::Auto)]
    throttle: Throttle,
    /// The percentage of its CPU time that a throttled VM keeps in any case
    #[arg(long, value_name = "PERCENT", default_value_t = 20,
          value_parser = clap::value_parser!(u8).range(1..=100))]
    throttle_floor: u8,
    /// How many seconds from now the VM is to have arrived; it is throttled as far as
    /// that takes, but not below its floor
    #[arg(long, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    deadline: Option<u64>,
    /// What to do with a VM that does not converge even at its floor [default:
    /// cancel; with --throttle off, keep]
    #[arg(long, value_parser = one_of::<OnStall>(words::ON_STALL))]
    on_stall: Option<OnStall>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(client: &Client, args: PredictArgs) -> Result<ExitCode, Problem> {
    let request = PredictRequest {
        to: args.host,
        downtime_ms: args.downtime_ms,
        slowing: Slowing {
            throttle: args.throttle,
            floor: f64::from(args.throttle_floor) / 100.0,
            deadline_s: args.deadline,
            on_stall: args.on_stall,
        },
        rate_bits_per_s: args.rate,
    };
    let path = format!("/v1/vms/{}/predict", segment(&args.name));
    let prediction: Prediction = client.request(Method::POST, &path, Some(&request)).await?;
    if args.json {
        print_json(&prediction)?;
    } else {
        print_line(format_args!("{}", sentences(&prediction)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn sentences(prediction: &Prediction) -> String {
    let Prediction { vm, to, free, slowed, share, lost_s, .. } = prediction;
    let set = prediction.working_set_bytes.map_or_else(String::new, |bytes| {
        format!(", over and over in some {}", amount::size(bytes))
    });
    let compressed = prediction.compressed.map_or_else(String::new, |one| {
        format!(
            ", and {} if its content, which shrinks to some {:.0} %, is compressed",
            amount::rate(one.delivered_bytes_per_s),
            (one.share * 100.0).max(1.0)
        )
    });
    let mut out = format!(
        "{vm} has touched {} and dirties {}{set}. {} can be delivered to {to}{compressed}.\n",
        amount::size(prediction.used_bytes),
        amount::rate(prediction.dirty_bytes_per_s),
        amount::rate(prediction.delivered_bytes_per_s),
    );
    if let Some(changed) = prediction.changed_share.filter(|share| *share < 1.0) {
        out += &format!(
            "Of a page that it writes again some {:.0} % change, and only that is sent again.\n",
            (changed * 100.0).max(1.0)
        );
    }
    out += &format!("Without throttling: {}.", outlook(free, prediction));
    if *share < 1.0 {
        out += &format!(
            "\nThrottled to {:.0} % of its CPU time: {}; {} of its work lost.",
            share * 100.0,
            outlook(slowed, prediction),
            amount::seconds(*lost_s)
        );
    }
    if let Some(needed) = prediction.needed_bytes_per_s {
        out += &format!(
            "\nWith {} it would need no throttling: --reserve-min takes that from other traffic, \
             where the network cards carry it.",
            amount::rate(needed)
        );
    }
    if !slowed.met {
        out += "\nIt does not converge like that: allow a lower --throttle-floor or a longer \
                --downtime-ms.";
    }
    if let Some(least) = prediction.misses_deadline_s {
        out +=
            &format!("\nThe deadline can't be met: it takes {} at least.", amount::seconds(least));
    }
    out += &free_memory(&prediction.free_memory);
    if let Some(why) = &prediction.refused {
        out += &format!("\nA move is refused: {why}.");
    }
    out
}

/// How the guest's free memory changes the prediction.
fn free_memory(free: &FreeMemory) -> String {
    let FreeMemory { unused_shared_bytes, reading_s, hinted, guest_clears } = free;
    let text = match (hinted, guest_clears) {
        (true, Some(true)) => {
            "The guest's kernel clears each page to report it as free, so it takes longer than \
             this: boot it with init_on_alloc=0, or start the VM without free-page-hint."
                .to_owned()
        }
        (true, Some(false)) => {
            "Less is sent: the guest reports which of it is free (free-page-hint).".to_owned()
        }
        (true, None) => "Less is sent if the guest reports which of it is free (free-page-hint), \
                         and more if its kernel has init_on_alloc=1."
            .to_owned(),
        (false, _) if *unused_shared_bytes >= SHARED_LEAST => {
            let advice = match guest_clears {
                Some(true) => "with --free-page-hint, and init_on_alloc=0 for its guest's kernel",
                Some(false) => "with --free-page-hint",
                None => "with --free-page-hint, if its guest's kernel has init_on_alloc=0",
            };
            format!(
                "Some {} of that are for {} of shared memory that the guest never used: QEMU reads \
                 it, and it is allocated here. Started {advice} the VM moves without.",
                amount::seconds(*reading_s),
                amount::size(*unused_shared_bytes)
            )
        }
        (false, _) => return String::new(),
    };
    format!("\n{text}")
}

fn outlook(outlook: &Outlook, prediction: &Prediction) -> String {
    #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
    let goal = amount::milliseconds(prediction.downtime_goal_ms as f64);
    // Lanes may lack the CPU time to compress.
    let time = match (outlook.most_s, prediction.compressed) {
        (_, None) => format!("about {}", amount::seconds(outlook.total_s)),
        (Some(most_s), _) => {
            format!("{} to {}", amount::seconds(outlook.total_s), amount::seconds(most_s))
        }
        (None, _) => format!("{} or more", amount::seconds(outlook.total_s)),
    };
    format!(
        "{time} for {}, downtime {} (goal {goal})",
        amount::size(outlook.bytes),
        amount::milliseconds(outlook.downtime_ms)
    )
}

#[cfg(test)]
mod tests {
    use api::Compressed;

    use super::*;

    fn prediction() -> Prediction {
        let outlook = |total_s, mib: u64, downtime_ms, met| Outlook {
            total_s,
            most_s: None,
            bytes: mib << 20,
            downtime_ms,
            met,
        };
        let free = outlook(40.0, 900, 2100.0, false);
        let slowed = outlook(21.0, 500, 298.0, true);
        Prediction {
            vm: "web1".to_owned(),
            to: "host-b".to_owned(),
            downtime_goal_ms: 300,
            used_bytes: 400 << 20,
            dirty_bytes_per_s: 50.0 * 1_048_576.0,
            working_set_bytes: Some(64 << 20),
            changed_share: None,
            delivered_bytes_per_s: 23.0 * 1_048_576.0,
            compressed: None,
            free,
            slowed,
            share: 0.18,
            lost_s: 6.1,
            misses_deadline_s: None,
            needed_bytes_per_s: None,
            free_memory: FreeMemory::default(),
            refused: None,
        }
    }

    #[test]
    fn both_outlooks_are_described() {
        let text = sentences(&prediction());
        assert_eq!(
            text,
            "web1 has touched 400 MiB and dirties 50.0 MiB/s, over and over in some 64.0 MiB. 23.0 \
             MiB/s can be delivered to host-b.\nWithout throttling: about 40.0 s for 900 MiB, \
             downtime 2.10 s (goal 300 ms).\nThrottled to 18 % of its CPU time: about 21.0 s for \
             500 MiB, downtime 298 ms (goal 300 ms); 6.10 s of its work lost."
        );
    }

    #[test]
    fn what_compression_gains_is_a_range_of_times() {
        let compressed = Compressed { share: 0.45, delivered_bytes_per_s: 51.0 * 1_048_576.0 };
        let told = |most_s| {
            let free = Outlook { most_s, ..prediction().free };
            sentences(&Prediction { compressed: Some(compressed), free, ..prediction() })
        };
        let range = told(Some(92.0));
        assert!(
            range.contains("to host-b, and 51.0 MiB/s if its content, which shrinks to some 45 %"),
            "{range}"
        );
        assert!(range.contains("Without throttling: 40.0 s to 1 min 32 s for 900 MiB"), "{range}");
        assert!(told(None).contains("Without throttling: 40.0 s or more for"), "{}", told(None));
    }

    #[test]
    fn the_changed_share_is_described_if_it_is_less_than_all() {
        let told = |changed_share| sentences(&Prediction { changed_share, ..prediction() });
        let little = told(Some(0.061));
        assert!(
            little.contains("host-b.\nOf a page that it writes again some 6 % change"),
            "{little}"
        );
        assert_eq!(told(Some(1.0)), told(None));
    }

    #[test]
    fn the_bandwidth_that_needs_no_throttling_is_described() {
        let needed_bytes_per_s = Some(71.0 * 1_048_576.0);
        let text = sentences(&Prediction { needed_bytes_per_s, ..prediction() });
        assert!(text.contains("lost.\nWith 71.0 MiB/s it would need no throttling"), "{text}");
    }

    #[test]
    fn free_memory_is_told_where_it_makes_a_difference() {
        let told = |unused_mib: u64, hinted, guest_clears| {
            let unused_shared_bytes = unused_mib << 20;
            free_memory(&FreeMemory { unused_shared_bytes, reading_s: 7.5, hinted, guest_clears })
        };
        assert_eq!(told(200, false, None), "");
        let without = told(6000, false, None);
        assert!(without.contains("7.50 s of that are for 5.86 GiB of shared"), "{without}");
        assert!(without.contains("if its guest's kernel has init_on_alloc=0"), "{without}");
        assert!(!told(6000, false, Some(false)).contains("init_on_alloc"));
        assert!(told(0, true, Some(false)).contains("Less is sent: the guest reports"));
        assert!(told(0, true, Some(true)).contains("takes longer"));
        assert!(told(0, true, None).contains("and more if"));
    }

    #[test]
    fn needless_throttling_and_a_missed_deadline_are_described() {
        let calm = Prediction { share: 1.0, slowed: prediction().slowed, ..prediction() };
        assert!(!sentences(&calm).contains("Throttled"));
        let mut late = prediction();
        late.slowed.met = false;
        late.misses_deadline_s = Some(30.0);
        let text = sentences(&late);
        assert!(text.contains("--throttle-floor") && text.contains("30.0 s at least"), "{text}");
    }

    #[test]
    fn a_move_that_would_be_refused_is_reported() {
        let refused = Some("non-migratable device: nvme".to_owned());
        let text = sentences(&Prediction { refused, ..prediction() });
        assert!(text.ends_with("\nA move is refused: non-migratable device: nvme."), "{text}");
    }
}
