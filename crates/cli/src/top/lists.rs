//! The tables.

use api::{GangProgress, HostVm, Phase};
use client::cluster::{Ended, EndedAs, HostState, Known, Running};
use ratatui::text::Span;
use report::progress::{limit, phase};
use report::{amount, date, vm};

use super::grid::Column::{Extra, Number, Reason, Text};
use super::grid::{Grid, or_dash, toned, wrong};

pub(super) fn migrations(running: &[Running<'_>]) -> Grid {
    let columns = [
        Text("VM"),
        Text("FROM → TO"),
        Text("PHASE"),
        Number("DONE"),
        Number("WIRE"),
        Extra("DIRTIES"),
        Extra("LEFT"),
        Number("TIME LEFT"),
        Text("LIMITED BY"),
    ];
    Grid::new(&columns, running.iter().map(migration).collect())
}

fn migration(one: &Running<'_>) -> Vec<Span<'static>> {
    let progress = one.progress;
    let streams = matches!(progress.phase, Phase::FirstPass | Phase::LaterPass);
    let rate = |bytes_per_s: f64| or_dash(streams.then(|| amount::rate(bytes_per_s)));
    let limit = limit(progress).filter(|_| streams);
    let mut limits: Vec<String> = limit
        .map(|text| text.strip_prefix("limited by ").unwrap_or(text).to_owned())
        .into_iter()
        .collect();
    if progress.share < 1.0 {
        limits.push(format!("throttled to {:.0} %", progress.share * 100.0));
    }
    if let Some(gang) = one.gang {
        limits.push(format!("gang {gang}"));
    }
    vec![
        Span::raw(progress.vm.clone()),
        Span::raw(format!("{} → {}", progress.from, progress.to)),
        Span::raw(phase(progress)),
        Span::raw(format!("{:.0} %", progress.percent.clamp(0.0, 100.0))),
        rate(progress.wire_bytes_per_s),
        or_dash(progress.dirties().filter(|_| streams).map(amount::rate)),
        or_dash(streams.then(|| amount::size(progress.left_bytes))),
        or_dash(progress.time_left_s.filter(|_| streams).map(amount::seconds)),
        Span::raw(limits.join(", ")),
    ]
}

pub(super) fn gang(gang: &GangProgress) -> String {
    let totals = &gang.totals;
    let vms = amount::counted(gang.moves.len() as u64, "VM");
    let failed = match totals.failed {
        0 => String::new(),
        some => format!(", {some} failed"),
    };
    format!(
        "Gang {}: {} of {vms} moved, {} moving, {} waiting{failed} · {} on the wire · {}",
        gang.id,
        totals.done,
        totals.moving,
        totals.waiting,
        amount::rate(totals.wire_bytes_per_s),
        amount::seconds(gang.elapsed_s)
    )
}

pub(super) fn hosts(known: &Known) -> Grid {
    let columns =
        [Text("HOST"), Text("RACK"), Number("VMS"), Number("THEIR RAM"), Number("ROOM"), Reason];
    let rows = known.hosts.iter().map(|(name, state)| host(name, state));
    Grid::new(&columns, rows.collect())
}

fn host(name: &str, state: &HostState) -> Vec<Span<'static>> {
    let census = state.census.as_ref();
    let problem = match (&state.problem, census) {
        (Some(problem), _) => wrong(problem.clone()),
        (None, None) => Span::raw("not queried yet"),
        (None, Some(_)) => Span::raw(""),
    };
    vec![
        Span::raw(name.to_owned()),
        or_dash(state.rack.clone()),
        or_dash(census.map(|census| census.vms.len().to_string())),
        or_dash(census.map(|_| amount::size(state.ram_bytes()))),
        or_dash(state.free_bytes().map(amount::size)),
        problem,
    ]
}

pub(super) fn vms(known: &Known) -> Grid {
    let columns = [
        Text("VM"),
        Text("HOST"),
        Text("STATE"),
        Number("VCPUS"),
        Number("RAM"),
        Number("IN USE"),
        Extra("PROGRAM"),
    ];
    Grid::new(&columns, known.vms().map(|(host, vm)| vm_of(host, vm)).collect())
}

fn vm_of(host: &str, one: &HostVm) -> Vec<Span<'static>> {
    vec![
        Span::raw(one.name.clone()),
        Span::raw(host.to_owned()),
        toned(vm::state(one)),
        Span::raw(one.vcpus.to_string()),
        Span::raw(amount::size(one.ram_bytes)),
        Span::raw(amount::size(one.used_bytes)),
        or_dash(one.program_replaced.then(|| "replaced".to_owned())),
    ]
}

/// The history, with at most `most` rows.
pub(super) fn history(known: &Known, most: usize) -> Grid {
    let columns = [
        Text("VM"),
        Text("FROM → TO"),
        Text("RESULT"),
        Number("DOWNTIME"),
        Number("TOOK"),
        Extra("ON THE WIRE"),
        Text("ENDED"),
        Reason,
    ];
    Grid::new(&columns, known.history().iter().take(most).map(ended).collect())
}

fn ended(one: &Ended) -> Vec<Span<'static>> {
    let why = match &one.result {
        EndedAs::Failed(why) | EndedAs::InDoubt(why) => why.clone(),
        EndedAs::Done | EndedAs::Cancelled => String::new(),
    };
    vec![
        Span::raw(one.vm.clone()),
        Span::raw(format!("{} → {}", one.from, one.to)),
        toned(one.result.described()),
        or_dash(one.downtime_ms.map(amount::milliseconds)),
        or_dash(one.total_s.map(amount::seconds)),
        or_dash(one.wire_bytes.map(amount::size)),
        Span::raw(date::utc_to_the_second(one.ended_unix_s)),
        Span::raw(why),
    ]
}
