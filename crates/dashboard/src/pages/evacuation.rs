//! A dry run of an evacuation, as a picture and as a table with the same contents.

use std::collections::BTreeMap;

use api::{GangPlan, HostRoom, PlannedMove};
use client::cluster::Known;
use maud::{Markup, html};
use report::{amount, full_stop};

use super::super::choice::Choice;
use super::super::gate::Gate;
use super::table::Column::{Number, Text};
use super::table::table;
use super::{NavItem, Page, forms};

/// The drawing's width, in units that the browser scales.
const WIDTH: f64 = 900.0;
/// The x positions of the source and of the destinations.
const LEAVE: f64 = 210.0;
const ARRIVE: f64 = 560.0;
const THICK: f64 = 14.0;
const TOP: f64 = 12.0;
/// The least height of all VMs together; many VMs need more.
const HEIGHT: f64 = 300.0;
/// The least height of a VM, so that its name next to it is legible.
const VM_MIN: f64 = 18.0;
/// The gap between two destinations.
const GAP: f64 = 34.0;
/// Above this number, VMs are drawn as one band for each destination.
const VMS_MAX: usize = 40;

pub(crate) type Planned<'p> = (&'p str, &'p Result<GangPlan, String>);

pub(crate) fn page(
    known: &Known,
    planned: Option<Planned<'_>>,
    choice: &Choice,
    gate: &Gate,
) -> Markup {
    let body = html! {
        h1 { "Evacuate a host" }
        p.lede {
            "A plan shows where each VM would go, by content and free memory. It moves nothing."
        }
        (form(known, planned.map(|(host, _)| host), choice))
        @if let Some((host, plan)) = planned {
            section #plan aria-labelledby="plan-head" {
                h2 #plan-head { "Plan for " (host) }
                @match plan {
                    Ok(plan) => (described(host, plan, choice, gate)),
                    Err(problem) => p.alert role="alert" { (problem) },
                }
            }
        }
    };
    Page { title: "Evacuate a host", place: NavItem::Evacuate, every_s: None, body }.render()
}

fn form(known: &Known, host: Option<&str>, choice: &Choice) -> Markup {
    html! {
        form.card.fields.row action="evacuate" method="get" {
            div.field {
                label for="host" { "Host" }
                select #host name="host" required {
                    @for (name, state) in &known.hosts {
                        @let vms = state.census.as_ref().map_or(0, |census| census.vms.len());
                        option value=(name) selected[host == Some(name)] {
                            (name) " (" (amount::counted(vms as u64, "VM")) ")"
                        }
                    }
                }
            }
            (forms::choice(choice))
            button { "Plan" }
        }
    }
}

fn described(host: &str, plan: &GangPlan, choice: &Choice, gate: &Gate) -> Markup {
    let used: u64 = plan.moves.iter().map(|one| one.used_bytes).fold(0, u64::saturating_add);
    let shared = plan.moves.iter().filter_map(|one| one.shared_bytes).fold(0, u64::saturating_add);
    html! {
        @if plan.moves.is_empty() { p.quiet { "No VM would move." } }
        @else {
            p {
                (amount::counted(plan.moves.len() as u64, "VM")) " to move, about "
                (amount::size(used.saturating_sub(shared)))
                " to cross the network, before compression."
            }
            (picture(host, plan))
        }
        @if !plan.notes.is_empty() {
            ul.notes { @for note in &plan.notes { li { (full_stop(note)) } } }
        }
        @if !plan.moves.is_empty() {
            @if !gate.is_read_only() {
                form method="post" action="evacuate" {
                    input type="hidden" name="token" value=(gate.token());
                    input type="hidden" name="host" value=(host);
                    input type="hidden" name="downtime_ms" value=(choice.downtime_ms);
                    input type="hidden" name="disks" value=(choice.disks.value());
                    p {
                        button { "Evacuate " (host) }
                        span.quiet { " It is planned again then, as hosts are at that moment." }
                    }
                }
            }
            (as_table(plan))
        }
    }
}

fn as_table(plan: &GangPlan) -> Markup {
    let or_dash = |bytes: Option<u64>| bytes.map_or_else(|| "—".to_owned(), amount::size);
    let columns =
        [Text("VM"), Text("To"), Number("RAM"), Number("In use"), Number("Shared, not sent")];
    let row = |one: &PlannedMove| {
        html! {
            tr {
                th scope="row" { (one.vm) }
                td.name { (one.to) }
                td.n { (amount::size(one.ram_bytes)) }
                td.n { (amount::size(one.used_bytes)) }
                td.n { (or_dash(one.shared_bytes)) }
            }
        }
    };
    table("Where each VM would go", columns, plan.moves.iter().map(row))
}

/// A VM, or all VMs that move to one host if there are many.
struct Band<'p> {
    name: String,
    to: &'p str,
    ram_bytes: u64,
    height: f64,
}

/// The bands, grouped by destination so that they don't cross.
fn bands(plan: &GangPlan) -> Vec<Band<'_>> {
    let mut by_host: BTreeMap<&str, Vec<&PlannedMove>> = BTreeMap::new();
    for one in &plan.moves {
        by_host.entry(&one.to).or_default().push(one);
    }
    let one_by_one = plan.moves.len() <= VMS_MAX;
    let mut bands: Vec<Band<'_>> = Vec::new();
    for (to, moves) in by_host {
        let band = |name, ram_bytes| Band { name, to, ram_bytes, height: 0.0 };
        if one_by_one {
            bands.extend(moves.iter().map(|one| band(one.vm.clone(), one.ram_bytes)));
        } else {
            let ram = moves.iter().fold(0, |sum: u64, one| sum.saturating_add(one.ram_bytes));
            bands.push(band(amount::counted(moves.len() as u64, "VM"), ram));
        }
    }
    let all = bands.iter().fold(0, |sum: u64, one| sum.saturating_add(one.ram_bytes)).max(1);
    let height = HEIGHT.max(bands.len() as f64 * VM_MIN);
    for band in &mut bands {
        band.height = (band.ram_bytes as f64 / all as f64 * height).max(VM_MIN);
    }
    bands
}

fn picture(host: &str, plan: &GangPlan) -> Markup {
    let bands = bands(plan);
    let left: f64 = bands.iter().map(|band| band.height).sum();
    let destinations: Vec<&str> = {
        let mut all: Vec<&str> = bands.iter().map(|band| band.to).collect();
        all.dedup();
        all
    };
    let right = left + GAP * (destinations.len() as f64 - 1.0);
    // The source's side is shorter, and centred.
    let mut from_y = TOP + (right - left) / 2.0;
    let mut to_y = TOP;
    let mut drawn = Vec::new();
    let mut hosts: Vec<(&str, f64, f64)> = Vec::new();
    let height = right + 2.0 * TOP + 20.0;
    for band in &bands {
        match hosts.last_mut() {
            Some((to, _, end)) if *to == band.to => *end += band.height,
            last => {
                to_y += if last.is_some() { GAP } else { 0.0 };
                hosts.push((band.to, to_y, to_y + band.height));
            }
        }
        drawn.push((band, from_y, to_y));
        from_y += band.height;
        to_y += band.height;
    }
    let about = format!(
        "{} leave {host} for {}; the table below shows which goes where",
        amount::counted(plan.moves.len() as u64, "VM"),
        amount::counted(hosts.len() as u64, "host")
    );
    let top = TOP + (right - left) / 2.0;
    html! {
        figure.card.plan {
            div.scroll tabindex="0" role="region" aria-label="The plan as a picture" {
                svg viewBox={ "0 0 " (WIDTH) " " (tenths(height)) } role="img" aria-label=(about) {
                    text.host x=(LEAVE + THICK) y=(tenths(top + left + 18.0)) text-anchor="end" {
                        (host)
                    }
                    @for (index, (band, from_y, to_y)) in drawn.iter().enumerate() {
                        @let parity = if index % 2 == 0 { "even" } else { "odd" };
                        path.band.(parity) d=(ribbon(*from_y, *to_y, band.height)) {}
                        rect.leaves x=(LEAVE) y=(tenths(*from_y)) width=(THICK)
                            height=(tenths(band.height - 1.0)) {}
                        text x=(LEAVE - 10.0) y=(tenths(from_y + band.height / 2.0 + 4.0))
                            text-anchor="end" {
                            (short(&band.name)) " · " (amount::size(band.ram_bytes))
                        }
                    }
                    @for (name, from, to) in &hosts {
                        rect.arrives x=(ARRIVE) y=(tenths(*from)) width=(THICK)
                            height=(tenths(to - from - 1.0)) {}
                        (destination(name, *from, *to, room(plan, name)))
                    }
                }
            }
        }
    }
}

fn room<'p>(plan: &'p GangPlan, host: &str) -> Option<&'p HostRoom> {
    plan.rooms.iter().find(|room| room.host == host)
}

/// A host's name, and its memory before and after.
fn destination(name: &str, from: f64, to: f64, room: Option<&HostRoom>) -> Markup {
    const BAR: f64 = 290.0;
    let x = ARRIVE + THICK + 14.0;
    let middle = f64::midpoint(from, to);
    html! {
        text.host x=(x) y=(tenths(middle - 3.0)) { (short(name)) }
        @if let Some(room) = room {
            @let taken = room.free_bytes.saturating_sub(room.left_bytes);
            @let share = taken as f64 / room.free_bytes.max(1) as f64;
            rect.room x=(x) y=(tenths(middle + 4.0)) width=(BAR) height="6" rx="3" {}
            rect.used x=(x) y=(tenths(middle + 4.0)) width=(tenths(BAR * share)) height="6" rx="3" {}
            text x=(x) y=(tenths(middle + 24.0)) {
                (amount::size(room.left_bytes)) " left of " (amount::size(room.free_bytes)) " free"
            }
        }
    }
}

/// The path of a band from one side to the other.
fn ribbon(from_y: f64, to_y: f64, height: f64) -> String {
    let (left, right) = (LEAVE + THICK, ARRIVE);
    let middle = f64::midpoint(left, right);
    let (a, b) = (tenths(from_y), tenths(to_y));
    let (c, d) = (tenths(to_y + height - 1.0), tenths(from_y + height - 1.0));
    format!(
        "M{left} {a}C{middle} {a} {middle} {b} {right} {b}V{c}C{middle} {c} {middle} {d} {left} \
         {d}Z"
    )
}

fn tenths(value: f64) -> String {
    format!("{value:.1}")
}

/// A name shortened to fit next to the drawing; the table has the whole name.
fn short(name: &str) -> String {
    const LETTERS_MAX: usize = 20;
    if name.chars().count() <= LETTERS_MAX {
        return name.to_owned();
    }
    name.chars().take(LETTERS_MAX - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(moves: usize) -> GangPlan {
        let one = |n: usize| PlannedMove {
            vm: format!("web{n}"),
            from: "host-a".to_owned(),
            to: format!("host-{}", n % 3),
            ram_bytes: (n as u64 + 1) << 30,
            used_bytes: 1 << 30,
            shared_bytes: None,
            shared: None,
            limit_bits_per_s: None,
        };
        GangPlan { moves: (0..moves).map(one).collect(), rooms: Vec::new(), notes: Vec::new() }
    }

    #[test]
    fn few_vms_are_drawn_each_and_many_by_destination() {
        for (moves, drawn) in [(1, 1), (VMS_MAX, VMS_MAX), (VMS_MAX + 1, 3), (1000, 3)] {
            assert_eq!(bands(&plan(moves)).len(), drawn);
        }
        let whole = plan(1000);
        let many = bands(&whole);
        let all: u64 = whole.moves.iter().map(|one| one.ram_bytes).sum();
        assert_eq!(many.iter().map(|band| band.ram_bytes).sum::<u64>(), all);
        assert!(many.iter().all(|band| band.height >= VM_MIN));
    }

    #[test]
    fn a_plan_that_is_odd_still_makes_a_picture() {
        let mut odd = plan(3);
        odd.moves[0].ram_bytes = 0;
        odd.moves[1].ram_bytes = u64::MAX;
        odd.rooms =
            vec![HostRoom { host: "host-0".to_owned(), free_bytes: 0, left_bytes: u64::MAX }];
        let picture = picture("host-a", &odd).into_string();
        assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
    }
}
