//! The form that moves a VM, and the fields that it shares with the form of an evacuation.

use api::HostVm;
use client::cluster::Known;
use maud::{Markup, html};
use report::amount;
use report::vm::state;

use super::super::choice::{Choice, Disks};
use super::super::gate::Gate;
use super::{NavItem, Page, tables};

pub(crate) fn move_form(known: &Known, from: &str, vm: &HostVm, gate: &Gate) -> Markup {
    let title = format!("Move {}", vm.name);
    let body = html! {
        h1 { (title) }
        p.lede {
            "It is on " a href=(tables::link("host", &[("name", from)])) { (from) } ", has "
            (amount::size(vm.ram_bytes)) " of RAM and uses " (amount::size(vm.used_bytes)) "."
        }
        @if gate.is_read_only() {
            p.alert { "These pages change nothing." }
        } @else if !tables::can_move(vm) {
            p.alert { "It can't be moved now: it is " (state(vm).0) "." }
        } @else {
            (form(known, from, vm, gate))
        }
    };
    Page { title: &title, place: NavItem::Elsewhere, every_s: None, body }.render()
}

fn form(known: &Known, from: &str, vm: &HostVm, gate: &Gate) -> Markup {
    let others = known.hosts.iter().filter(|(name, _)| *name != from);
    html! {
        form.card.fields method="post" action="move" {
            input type="hidden" name="token" value=(gate.token());
            input type="hidden" name="from" value=(from);
            input type="hidden" name="vm" value=(vm.name);
            div.field {
                label for="to" { "To" }
                select #to name="to" required {
                    @for (name, host) in others {
                        @let free = host.census.as_ref().and_then(|census| census.free_bytes);
                        option value=(name) {
                            (name)
                            @if let Some(free) = free { " (" (amount::size(free)) " free)" }
                        }
                    }
                }
            }
            (choice(&Choice::default()))
            p { button { "Move " (vm.name) } " " a href="vms" { "Leave it where it is" } }
            p.quiet { "It keeps running. Until its commit, the move can be cancelled." }
        }
    }
}

/// The fields for how VMs are moved.
pub(super) fn choice(choice: &Choice) -> Markup {
    html! {
        div.field {
            label for="downtime_ms" { "Downtime goal, in milliseconds" }
            input #downtime_ms type="number" name="downtime_ms" min="1" max="60000" required
                value=(choice.downtime_ms);
        }
        div.field {
            label for="disks" { "Disks" }
            select #disks name="disks" {
                @for one in Disks::ALL {
                    option value=(one.value()) selected[one == choice.disks] {
                        (match one {
                            Disks::Checked => "Stay where they are; both hosts are checked",
                            Disks::Shared => "Both hosts see the same storage: don’t check",
                            Disks::Moved => "Move too; images are made where there are none",
                        })
                    }
                }
            }
        }
    }
}
