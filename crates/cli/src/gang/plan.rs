//! The plan of a gang, as text.

use api::{GangPlan, PlannedMove, SharedParts};

use report::{aligned, amount, full_stop};

/// The result of a dry run.
pub(crate) fn plan(plan: &GangPlan) -> String {
    let mut out = String::new();
    if !plan.moves.is_empty() {
        out += &moves(plan);
        let used: u64 = plan.moves.iter().map(|one| one.used_bytes).sum();
        let shared: u64 = plan.moves.iter().filter_map(|one| one.shared_bytes).sum();
        out += &format!(
            "\n{}, about {} to cross the network, before compression.\n",
            amount::counted(plan.moves.len() as u64, "VM"),
            amount::size(used.saturating_sub(shared))
        );
        out += &limits(plan);
    }
    if !plan.rooms.is_empty() {
        let mut rows = vec![["HOST", "FREE", "LEFT AFTER"].map(str::to_owned)];
        rows.extend(plan.rooms.iter().map(|room| {
            [room.host.clone(), amount::size(room.free_bytes), amount::size(room.left_bytes)]
        }));
        out += &format!("\n{}", aligned(&rows));
    }
    for note in &plan.notes {
        out += &format!("Note: {}\n", full_stop(note));
    }
    out + "Nothing was moved.\n"
}

/// With which limits the first moves start; nothing if the gang has none.
fn limits(plan: &GangPlan) -> String {
    let limit = |one: &PlannedMove| Some(format!("{} {}bit/s", one.vm, one.limit_bits_per_s?));
    let limits: Vec<String> = plan.moves.iter().filter_map(limit).collect();
    if limits.is_empty() {
        return String::new();
    }
    format!("Limits at first, and then by what each can use: {}.\n", limits.join(", "))
}

/// The plan's VMs, with their shared content if it is known for any of them.
fn moves(plan: &GangPlan) -> String {
    let is_known = plan.moves.iter().any(|one| one.shared.is_some());
    let mut heads = vec!["VM", "FROM", "TO", "RAM", "IN USE", "SHARED"];
    if is_known {
        heads.extend(["HELD", "WITHIN", "COMMON"]);
    }
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), amount::size);
    let mut rows = vec![heads.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    rows.extend(plan.moves.iter().map(|one| {
        let mut row = vec![one.vm.clone(), one.from.clone(), one.to.clone()];
        row.extend([one.ram_bytes, one.used_bytes].map(amount::size));
        row.push(size(one.shared_bytes));
        if is_known {
            let parts: [fn(SharedParts) -> u64; 3] =
                [|one| one.held_bytes, |one| one.within_bytes, |one| one.common_bytes];
            row.extend(parts.map(|part| size(one.shared.map(part))));
        }
        row
    }));
    let why = "Shared is not sent: held at the destination, more than once within the VM, or \
               common to VMs of this gang.\n";
    aligned(&rows) + if is_known { why } else { "" }
}

/// The lines that announce a gang.
pub(crate) fn beginning(id: &str, plan: &GangPlan) -> Vec<String> {
    let used: u64 = plan.moves.iter().map(|one| one.used_bytes).sum();
    let count = amount::counted(plan.moves.len() as u64, "VM");
    let mut lines = vec![format!("Gang {id}: {count} to move, {} in use.", amount::size(used))];
    lines.extend(plan.notes.iter().map(|note| format!("Note: {}", full_stop(note))));
    lines
}

#[cfg(test)]
mod tests {
    use api::HostRoom;

    use super::*;

    #[test]
    fn a_plan_is_a_table() {
        let plan_of_one = GangPlan {
            moves: vec![PlannedMove {
                vm: "web1".to_owned(),
                from: "host-a".to_owned(),
                to: "host-b".to_owned(),
                ram_bytes: 1 << 30,
                used_bytes: 512 << 20,
                shared_bytes: None,
                shared: None,
                limit_bits_per_s: None,
            }],
            rooms: vec![HostRoom {
                host: "host-b".to_owned(),
                free_bytes: 8 << 30,
                left_bytes: 7 << 30,
            }],
            notes: vec!["web9 on host-a is dead: it is left out".to_owned()],
        };
        let text = plan(&plan_of_one);
        assert_eq!(
            text,
            "VM    FROM    TO      RAM       IN USE   SHARED\nweb1  host-a  host-b  1.00 GiB  512 \
             MiB  -\n\n1 VM, about 512 MiB to cross the network, before compression.\n\nHOST    \
             FREE      LEFT AFTER\nhost-b  8.00 GiB  7.00 GiB\nNote: web9 on host-a is dead: it is \
             left out.\nNothing was moved.\n"
        );
    }

    #[test]
    fn the_limits_of_the_first_moves_are_listed() {
        let one = |vm: &str, limit: Option<&str>| PlannedMove {
            vm: vm.to_owned(),
            from: "host-a".to_owned(),
            to: "host-b".to_owned(),
            ram_bytes: 1 << 30,
            used_bytes: 512 << 20,
            shared_bytes: None,
            shared: None,
            limit_bits_per_s: limit.map(|limit| limit.parse().unwrap()),
        };
        let moves = vec![one("web1", Some("7.5G")), one("web2", Some("2.5G")), one("web3", None)];
        let text = plan(&GangPlan { moves, rooms: Vec::new(), notes: Vec::new() });
        let expected = "by what each can use: web1 7.5Gbit/s, web2 2.5Gbit/s.\nNothing was moved.";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn shared_content_is_listed_by_its_reason() {
        let one = |vm: &str, shared: Option<SharedParts>| PlannedMove {
            vm: vm.to_owned(),
            from: "host-a".to_owned(),
            to: "host-b".to_owned(),
            ram_bytes: 1 << 30,
            used_bytes: 512 << 20,
            shared_bytes: shared.map(|parts| parts.bytes()),
            shared,
            limit_bits_per_s: None,
        };
        let parts =
            SharedParts { held_bytes: 128 << 20, within_bytes: 8 << 20, common_bytes: 64 << 20 };
        let moves = vec![one("web1", Some(parts)), one("web2", None)];
        let text = plan(&GangPlan { moves, rooms: Vec::new(), notes: Vec::new() });
        assert_eq!(
            text,
            "VM    FROM    TO      RAM       IN USE   SHARED   HELD     WITHIN    COMMON\nweb1  \
             host-a  host-b  1.00 GiB  512 MiB  200 MiB  128 MiB  8.00 MiB  64.0 MiB\nweb2  \
             host-a  host-b  1.00 GiB  512 MiB  -        -        -         -\nShared is not sent: \
             held at the destination, more than once within the VM, or common to VMs of this \
             gang.\n\n2 VMs, about 824 MiB to cross the network, before compression.\nNothing was \
             moved.\n"
        );
    }
}
