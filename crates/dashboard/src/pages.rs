//! The pages as HTML.
//!
//! `maud` escapes all texts; nothing here turns that off.

mod evacuation;
mod forms;
mod moves;
mod plot;
mod table;
mod tables;

use client::cluster::{HostState, Known};
use maud::{DOCTYPE, Markup, html};
use report::amount;

use super::gate::Gate;
pub(super) use evacuation::page as evacuation;
pub(super) use forms::move_form;

/// The page that navigation marks as current.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NavItem {
    Overview,
    Vms,
    Evacuate,
    History,
    Elsewhere,
}

const NAV_ITEMS: [(NavItem, &str, &str); 4] = [
    (NavItem::Overview, "./", "Overview"),
    (NavItem::Vms, "vms", "VMs"),
    (NavItem::Evacuate, "evacuate", "Evacuate a host"),
    (NavItem::History, "history", "History"),
];

struct Page<'p> {
    title: &'p str,
    place: NavItem,
    /// Seconds between refreshes; none for pages with a form to fill in.
    every_s: Option<u32>,
    body: Markup,
}

impl Page<'_> {
    fn render(self) -> Markup {
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    title { (self.title) " · Droveway" }
                    link rel="icon" type="image/svg+xml" href="icon.svg";
                    link rel="stylesheet" href="style.css";
                    @if let Some(every_s) = self.every_s {
                        noscript { meta http-equiv="refresh" content=(every_s.max(5)); }
                    }
                    script src="script.js" defer {}
                }
                body {
                    a.skip href="#main" { "Skip to the content" }
                    header.top {
                        a.brand href="./" { "Droveway" }
                        nav aria-label="Pages" {
                            ul {
                                @for (place, href, name) in NAV_ITEMS {
                                    @let current = (place == self.place).then_some("page");
                                    li { a href=(href) aria-current=[current] { (name) } }
                                }
                            }
                        }
                    }
                    main #main tabindex="-1" data-every=[self.every_s] {
                        (self.body)
                    }
                    p #connection .connection role="alert" hidden {
                        "The dashboard does not answer: what is shown may be old."
                    }
                    footer { "Droveway " (env!("CARGO_PKG_VERSION")) }
                }
            }
        }
    }
}

/// A page for an error.
pub(super) fn problem(text: &str) -> Markup {
    let body = html! {
        h1 { "That did not work" }
        p.alert role="alert" { (text) }
        p { a href="./" { "Back to the overview" } }
    };
    Page { title: "Problem", place: NavItem::Elsewhere, every_s: None, body }.render()
}

/// Leads on to the first page.
///
/// A redirect would not do: if the link was on a page of another site, browsers attribute the
/// redirected request to that site and send no cookie.
pub(super) fn opened(home: &str) -> Markup {
    let refresh = html! { meta http-equiv="refresh" content={ "0; url=" (home) }; };
    plain(&refresh, &html! { p { a href=(home) { "Go on to the overview" } } })
}

/// The page for a browser without a cookie.
pub(super) fn locked() -> Markup {
    let body = html! {
        h1 { "This browser is not let in" }
        p {
            "Open the address that " code { "droveway dashboard" } " printed last. Each works \
             once, and cookies must be on."
        }
    };
    plain(&Markup::default(), &body)
}

/// A page without styles, which need the cookie too.
fn plain(head: &Markup, body: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                (head)
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "Droveway" }
            }
            body { (body) }
        }
    }
}

pub(super) fn overview(known: &Known, gate: &Gate) -> Markup {
    let running = known.running();
    let vms = known.vm_count();
    let silent = known.silent_hosts().count();
    let body = html! {
        h1 { "Overview" }
        (moves::status(known, running.len()))
        (problems(known))
        section #tiles .tiles data-live aria-label="In figures" {
            (tile("Hosts", &known.hosts.len().to_string(),
                  &if silent == 0 { "all answer".to_owned() } else { format!("{silent} silent") }))
            (tile("VMs", &vms.to_string(), "on all hosts"))
            (tile("In motion", &running.len().to_string(), "migrations"))
            (tile("Room", &amount::size(known.free_bytes()), "free for arriving VMs"))
        }
        section #moving data-live aria-labelledby="moving-head" {
            h2 #moving-head { "In progress" }
            (moves::running(&running, gate))
            (moves::gangs(known, gate))
        }
        section #hosts data-live aria-labelledby="hosts-head" {
            h2 #hosts-head { "Hosts" }
            (tables::hosts(known))
        }
        section #lately data-live aria-labelledby="lately-head" {
            h2 #lately-head { "Lately" }
            (tables::history(&known.history(), LATELY, "The last migrations"))
            p { a href="history" { "All of the history" } }
        }
    };
    Page { title: "Overview", place: NavItem::Overview, every_s: Some(1), body }.render()
}

/// Rows of history on the first page.
const LATELY: usize = 5;

fn tile(name: &str, value: &str, about: &str) -> Markup {
    html! {
        div.tile {
            p.name { (name) }
            p.value { (value) }
            p.about { (about) }
        }
    }
}

/// Why migrations may not be shown as they are now.
fn problems(known: &Known) -> Markup {
    html! {
        div #problems data-live {
            @for problem in known.problems() {
                p.alert { (problem) }
            }
        }
    }
}

/// Which hosts' VMs may not be shown as they are now; the hosts' own pages say why.
fn silent_hosts(known: &Known) -> Markup {
    let silent: Vec<&str> = known.silent_hosts().collect();
    html! {
        div #silent data-live {
            @if !silent.is_empty() {
                p.alert {
                    "No answer from " (silent.join(", ")) ". VMs there are missing here, or shown \
                     as they were before."
                }
            }
        }
    }
}

pub(super) fn vms(known: &Known, gate: &Gate, words: &str) -> Markup {
    let body = html! {
        h1 { "VMs" }
        (moves::status(known, known.running().len()))
        (problems(known))
        (silent_hosts(known))
        (filter("vms", words, "Filter by VM, host or state"))
        section #vm-table data-live aria-label="VMs" {
            (tables::vms(known.vms(), words, gate.is_read_only(), "All VMs"))
        }
    };
    Page { title: "VMs", place: NavItem::Vms, every_s: Some(5), body }.render()
}

pub(super) fn host(known: &Known, name: &str, state: &HostState, gate: &Gate) -> Markup {
    let census = state.census.as_ref();
    let vms = census.into_iter().flat_map(|census| census.vms.iter().map(|vm| (name, vm)));
    let body = html! {
        h1 { (name) }
        (moves::status(known, known.running().len()))
        (problems(known))
        section #host data-live aria-label="The host" {
            @if let Some(problem) = &state.problem { p.alert { (problem) } }
            (tables::host_facts(state))
            p { a.button href=(tables::link("evacuate", &[("host", name)])) { "Plan an evacuation" } }
            (tables::vms(vms, "", gate.is_read_only(), &format!("VMs on {name}")))
        }
    };
    Page { title: name, place: NavItem::Elsewhere, every_s: Some(2), body }.render()
}

pub(super) fn history(known: &Known, words: &str) -> Markup {
    let mut all = known.history();
    all.retain(|one| tables::has_words(words, &[&one.vm, &one.from, &one.to, &one.id]));
    let body = html! {
        h1 { "History" }
        (moves::status(known, known.running().len()))
        (problems(known))
        p.lede {
            "Migrations that have ended: those from hosts whose agents are queried, and those of \
             gangs that they coordinated."
        }
        (filter("history", words, "Filter by VM, host or migration"))
        section #history-table data-live aria-label="Migrations" {
            (tables::history(&all, usize::MAX, "Migrations, the latest first"))
        }
    };
    Page { title: "History", place: NavItem::History, every_s: Some(5), body }.render()
}

/// A filter that acts while typing with the script, and on Enter without it.
fn filter(action: &str, words: &str, label: &str) -> Markup {
    html! {
        form.filter role="search" action=(action) method="get" {
            label for="q" { (label) }
            input #q type="search" name="q" value=(words) autocomplete="off" spellcheck="false";
            button { "Filter" }
            span #found .found role="status" {}
        }
    }
}
