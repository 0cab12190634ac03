//! Tables: hosts, VMs, history.

use api::{HostVm, VmStatus};
use client::cluster::{Ended, EndedAs, HostState, Known};
use client::segment;
use maud::{Markup, html};
use report::vm::state;
use report::{Tone, amount, date};

use super::table::Column::{Actions, Number, Text, Wide};
use super::table::table;

/// The address of a page with a query.
pub(super) fn link(page: &str, query: &[(&str, &str)]) -> String {
    let query: Vec<String> =
        query.iter().map(|(name, value)| format!("{name}={}", segment(value))).collect();
    format!("{page}?{}", query.join("&"))
}

/// Whether each word is in one of the texts.
pub(super) fn has_words(words: &str, texts: &[&str]) -> bool {
    let words = words.to_lowercase();
    let texts: Vec<String> = texts.iter().map(|text| text.to_lowercase()).collect();
    words.split_whitespace().all(|word| texts.iter().any(|text| text.contains(word)))
}

pub(super) fn hosts(known: &Known) -> Markup {
    let racks = known.hosts.values().any(|host| host.rack.is_some());
    let most = known.hosts.values().map(memory).max().unwrap_or(0).max(1);
    let columns = [
        Some(Text("Host")),
        racks.then_some(Text("Rack")),
        Some(Number("VMs")),
        Some(Number("Their RAM")),
        Some(Number("Room")),
        Some(Wide("Memory: VMs, room")),
        Some(Actions),
    ];
    let rows = known.hosts.iter().map(|(name, host)| host_row(name, host, racks, most));
    table("Hosts, with their VMs and room", columns.into_iter().flatten(), rows)
}

fn host_row(name: &str, host: &HostState, racks: bool, most: u64) -> Markup {
    let census = host.census.as_ref();
    html! {
        tr {
            th scope="row" { a href=(link("host", &[("name", name)])) { (name) } }
            @if racks { td { (host.rack.as_deref().unwrap_or("—")) } }
            @if let Some(census) = census {
                td.n { (census.vms.len()) }
                td.n { (amount::size(host.ram_bytes())) }
                td.n { (census.free_bytes.map_or_else(|| "—".to_owned(), amount::size)) }
                td.wide {
                    @if let Some(problem) = &host.problem { span.bad { (problem) } }
                    @else { (room_bar(host.ram_bytes(), census.free_bytes.unwrap_or(0), most)) }
                }
            } @else {
                td.n { "—" } td.n { "—" } td.n { "—" }
                td.wide {
                    @if let Some(problem) = &host.problem { span.bad { (problem) } }
                    @else { span.quiet { "not queried yet" } }
                }
            }
            td.n {
                a href=(link("evacuate", &[("host", name)])) {
                    "Evacuate" span.hidden { " " (name) } "…"
                }
            }
        }
    }
}

fn memory(host: &HostState) -> u64 {
    host.ram_bytes().saturating_add(host.free_bytes().unwrap_or(0))
}

/// A bar of used and free memory, hidden from screen readers: the cells next to it have the
/// figures.
fn room_bar(used: u64, free: u64, most: u64) -> Markup {
    let share = |bytes: u64| format!("{:.2}", bytes as f64 / most as f64 * 100.0);
    html! {
        svg.bar viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true" {
            rect.room x=(share(used)) y="0" width=(share(free)) height="6" {}
            rect.used x="0" y="0" width=(share(used)) height="6" {}
        }
    }
}

pub(super) fn host_facts(host: &HostState) -> Markup {
    let free = host.free_bytes();
    let vms = host.census.as_ref().map_or(0, |census| census.vms.len());
    html! {
        dl.facts {
            @if let Some(rack) = &host.rack { div { dt { "Rack" } dd { (rack) } } }
            div { dt { "VMs" } dd { (vms) } }
            div { dt { "Their RAM" } dd { (amount::size(host.ram_bytes())) } }
            div { dt { "Room" } dd { (free.map_or_else(|| "—".to_owned(), amount::size)) } }
        }
    }
}

/// The CSS class of a badge with this tone.
pub(super) fn class(tone: Tone) -> &'static str {
    match tone {
        Tone::Good => "good",
        Tone::Calm => "calm",
        Tone::Bad => "bad",
    }
}

/// Whether a VM can start to move.
pub(super) fn can_move(vm: &HostVm) -> bool {
    matches!(vm.status, VmStatus::Running | VmStatus::Paused) && vm.migration.is_none()
}

pub(super) fn vms<'v>(
    all: impl Iterator<Item = (&'v str, &'v HostVm)>,
    words: &str,
    read_only: bool,
    caption: &str,
) -> Markup {
    let has_its_words = |(host, vm): &(&str, &HostVm)| {
        has_words(words, &[host, &vm.name, state(vm).0, replaced(vm).unwrap_or_default()])
    };
    let all: Vec<_> = all.filter(has_its_words).collect();
    if all.is_empty() {
        return html! { p.quiet { "No VMs." } };
    }
    let columns = [
        Some(Text("VM")),
        Some(Text("Host")),
        Some(Text("State")),
        Some(Number("vCPUs")),
        Some(Number("RAM")),
        Some(Number("In use")),
        (!read_only).then_some(Actions),
    ];
    let rows = all.into_iter().map(|(host, vm)| vm_row(host, vm, read_only));
    table(caption, columns.into_iter().flatten(), rows)
}

/// What to show of a VM whose QEMU was replaced on disk since it started.
fn replaced(vm: &HostVm) -> Option<&'static str> {
    vm.program_replaced.then_some("QEMU replaced")
}

fn vm_row(host: &str, vm: &HostVm, read_only: bool) -> Markup {
    let (state, tone) = state(vm);
    html! {
        tr {
            th scope="row" { (vm.name) }
            td.name { a href=(link("host", &[("name", host)])) { (host) } }
            td {
                span.badge.(class(tone)) { (state) }
                @if let Some(replaced) = replaced(vm) { " " span.badge.calm { (replaced) } }
            }
            td.n { (vm.vcpus) }
            td.n { (amount::size(vm.ram_bytes)) }
            td.n { (amount::size(vm.used_bytes)) }
            @if !read_only {
                td.n {
                    @if can_move(vm) {
                        a href=(link("move", &[("from", host), ("vm", &vm.name)])) {
                            "Move" span.hidden { " " (vm.name) } "…"
                        }
                    }
                }
            }
        }
    }
}

pub(super) fn history(all: &[Ended], most: usize, caption: &str) -> Markup {
    if all.is_empty() {
        return html! { p.quiet { "No migration has ended yet." } };
    }
    let columns = [
        Text("VM"),
        Text("From"),
        Text("To"),
        Text("Result"),
        Number("Downtime"),
        Number("Took"),
        Number("On the wire"),
        Text("Ended"),
    ];
    table(caption, columns, all.iter().take(most).map(history_row))
}

fn history_row(one: &Ended) -> Markup {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "—".to_owned());
    let (result, tone) = one.result.described();
    html! {
        tr {
            th scope="row" {
                @match one.agent {
                    Some(agent) => {
                        @let number = agent.to_string();
                        a href=(link("report", &[("agent", &number), ("id", &one.id)])) { (one.vm) }
                    }
                    None => { (one.vm) }
                }
            }
            td.name { (one.from) }
            td.name { (one.to) }
            td {
                span.badge.(class(tone)) { (result) }
                @if let EndedAs::Failed(why) | EndedAs::InDoubt(why) = &one.result {
                    span.why { (why) }
                }
                @if let Some(gang) = &one.gang { span.why { "gang " (gang) } }
            }
            td.n { (or_dash(one.downtime_ms.map(amount::milliseconds))) }
            td.n { (or_dash(one.total_s.map(amount::seconds))) }
            td.n { (or_dash(one.wire_bytes.map(amount::size))) }
            td.nowrap { (date::utc_to_the_second(one.ended_unix_s)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_links_are_values_and_nothing_else() {
        assert_eq!(link("host", &[("name", "a&b=\"<")]), "host?name=a%26b%3D%22%3C");
    }

    #[test]
    fn all_words_are_looked_for_in_all_texts() {
        for (words, expected) in
            [("", true), ("WEB", true), ("web host-a", true), ("web host-b", false), ("  ", true)]
        {
            assert_eq!(has_words(words, &["web1", "host-a"]), expected, "{words}");
        }
    }
}
