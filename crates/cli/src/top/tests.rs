//! The screens for agents' answers, and the effects of keys.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use api::Outcome;
use client::cluster::Known;
use client::cluster::example::{host, known, moving, silent};
use report::example::example;

use super::*;
use keys::Tab;

fn screen(known: &Known, state: &State, width: u16, height: u16) -> String {
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
    view::draw(known, state, buffer.area, &mut buffer);
    lines(&buffer)
}

fn press(state: &mut State, known: &Known, code: KeyCode) -> Wish {
    state.take(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)), known)
}

#[test]
fn a_terminal_of_eighty_columns_shows_what_matters() {
    let shown = screen(&known("web1"), &State::new(false), 80, 24);
    for text in [
        "Droveway  1 Overview  2 Hosts",
        "web1  host-a → host-b  first pass",
        "41 %",
        "5.50 s",
        "host-b  r1      0",
        "moved",
        "q quit",
    ] {
        assert!(shown.contains(text), "no {text:?} in\n{shown}");
    }
    assert_eq!(shown.lines().count(), 24);
}

#[test]
fn a_large_terminal_has_a_plot_and_more_columns() {
    let shown = screen(&known("web1"), &State::new(false), 140, 50);
    for text in [
        "2 hosts · 2 VMs · 1 moving · room 16.0 GiB",
        "DIRTIES",
        "━ dirtied 4.77 MiB/s",
        "┌ web1 ━",
    ] {
        assert!(shown.contains(text), "no {text:?} in\n{shown}");
    }
}

#[test]
fn no_size_is_too_small() {
    for (width, height) in [(0, 0), (1, 1), (10, 3), (40, 5), (200, 8)] {
        for tab in Tab::ALL.map(|(tab, _)| tab) {
            let mut state = State::new(false);
            state.tab = tab;
            let shown = screen(&known("web1"), &state, width, height);
            assert_eq!(shown.lines().count(), usize::from(height));
        }
    }
}

#[test]
fn each_tab_has_its_table() {
    let known = known("web1");
    let mut state = State::new(false);
    for (key, text) in [('2', "THEIR RAM"), ('3', "VCPUS"), ('4', "DOWNTIME"), ('1', "In progress")]
    {
        assert_eq!(press(&mut state, &known, KeyCode::Char(key)), Wish::Nothing);
        assert!(screen(&known, &state, 100, 30).contains(text), "{key}");
    }
    press(&mut state, &known, KeyCode::Tab);
    assert_eq!(state.tab, Tab::Hosts);
}

#[test]
fn vms_whose_qemu_was_replaced_are_marked_where_there_is_room() {
    let mut known = known("web1");
    let census = known.hosts.get_mut("host-a").and_then(|host| host.census.as_mut()).unwrap();
    census.vms[1].program_replaced = true;
    let mut state = State::new(false);
    state.tab = Tab::Vms;
    for (width, is_shown) in [(120, true), (80, false)] {
        let shown = screen(&known, &state, width, 30);
        let marked: Vec<&str> = shown.lines().filter(|line| line.contains("replaced")).collect();
        assert_eq!(marked.iter().any(|line| line.contains("web2")), is_shown, "{shown}");
        assert_eq!(marked.len(), usize::from(is_shown), "{shown}");
    }
}

#[test]
fn each_tab_says_what_may_be_old() {
    let (old, fresh) = (silent(), known("web1"));
    for tab in Tab::ALL.map(|(tab, _)| tab) {
        let mut state = State::new(false);
        state.tab = tab;
        let shown = screen(&old, &state, 100, 30);
        assert!(shown.contains("no agent answers at"), "{shown}");
        assert_eq!(shown.contains("no answer from host-b"), tab == Tab::Vms, "{shown}");
        let shown = screen(&fresh, &state, 100, 30);
        assert!(!shown.contains("answer"), "{shown}");
    }
}

/// A VM that did not move, for a reason that no terminal has room for.
fn failed() -> Known {
    let mut report = example();
    report.vm = "web1".to_owned();
    let why = format!("host-b refuses the VM: {}", "it has no room, ".repeat(20));
    report.outcome = Outcome::Failed(why);
    let mut known =
        Known::example(vec![host("host-a", &["web1"])], Vec::new(), Vec::new(), vec![report]);
    let problem = "the agent of host-b can't be reached: ".to_owned() + &"it is late, ".repeat(20);
    known.hosts.entry("host-b".to_owned()).or_default().problem = Some(problem);
    known
}

/// Whatever the width, a row is as without its reason, which has a line of its own on narrow
/// terminals and is cut.
#[test]
fn rows_with_a_long_reason_are_cut_and_not_squeezed() {
    let known = failed();
    let mut state = State::new(false);
    for (tab, name, why) in [
        (Tab::History, "web1", "host-b refuses the VM"),
        (Tab::Hosts, "host-b", "the agent of host-b can't"),
    ] {
        state.tab = tab;
        for width in (60..300).step_by(7) {
            let shown = screen(&known, &state, width, 24);
            let lines: Vec<&str> = shown.lines().collect();
            let at = lines.iter().position(|line| line.starts_with(name)).unwrap();
            let cut = lines
                .iter()
                .find(|line| line.contains(why))
                .unwrap_or_else(|| panic!("{width} columns do not say {why:?}:\n{shown}"));
            assert!(cut.ends_with('…') && cut.chars().count() == usize::from(width), "{shown}");
            let below = lines[at + 1].starts_with("  ") && lines[at + 1].contains(why);
            assert!(lines[at].contains(why) || below, "{width}:\n{shown}");
            if tab == Tab::History && width >= 80 {
                let cells = ["web1  ", " → ", "  failed  ", " UTC"];
                assert!(cells.iter().all(|cell| lines[at].contains(cell)), "{width}:\n{shown}");
            }
        }
    }
    // As text, all rows are there with their lines.
    let mut buffer = Buffer::empty(Rect::new(0, 0, 80, overview::height_of_text(&known, 80)));
    overview::draw_text(&known, buffer.area, &mut buffer);
    let text = lines(&buffer);
    assert!(text.contains("\n  host-b refuses the VM") && text.ends_with("…\n\n"), "{text}");
}

#[test]
fn a_name_without_end_leaves_room_for_the_rest() {
    let long = known(&"long".repeat(100));
    let shown = screen(&long, &State::new(false), 80, 24);
    let row = shown.lines().find(|line| line.contains("41 %")).unwrap();
    assert!(
        row.starts_with("longlong") && row.contains("…  host-a → host-b  first pass"),
        "{shown}"
    );
}

#[test]
fn scrolling_moves_rows_off_the_top() {
    let names: Vec<String> = (100..200).map(|nth| format!("web{nth}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let many = Known::example(vec![host("host-a", &names)], Vec::new(), Vec::new(), Vec::new());
    let mut state = State::new(false);
    press(&mut state, &many, KeyCode::Char('3'));
    press(&mut state, &many, KeyCode::PageDown);
    press(&mut state, &many, KeyCode::Down);
    let shown = screen(&many, &state, 80, 10);
    assert!(shown.contains("web111") && !shown.contains("web110"), "{shown}");
    press(&mut state, &many, KeyCode::End);
    press(&mut state, &many, KeyCode::Down);
    assert!(screen(&many, &state, 80, 10).contains("web199"));
    press(&mut state, &many, KeyCode::Home);
    assert!(screen(&many, &state, 80, 10).contains("web100"));
}

#[test]
fn a_migration_is_cancelled_only_after_a_yes() {
    let mut other = moving("web2");
    other.id = "0badcafe".to_owned();
    let hosts = vec![host("host-a", &["web1", "web2"])];
    let both = Known::example(hosts, vec![moving("web1"), other], Vec::new(), Vec::new());
    let mut state = State::new(false);
    press(&mut state, &both, KeyCode::Down);
    assert_eq!(press(&mut state, &both, KeyCode::Char('c')), Wish::Nothing);
    let shown = screen(&both, &state, 80, 24);
    assert!(shown.contains("Cancel the move of web2? It stays at host-a. y/n"), "{shown}");
    assert_eq!(press(&mut state, &both, KeyCode::Char('q')), Wish::Nothing);
    press(&mut state, &both, KeyCode::Char('c'));
    let wish = press(&mut state, &both, KeyCode::Char('y'));
    assert_eq!(wish, Wish::Cancel { agent: 0, id: "0badcafe".to_owned() });
    assert_eq!(press(&mut state, &both, KeyCode::Char('y')), Wish::Nothing);
}

#[test]
fn a_read_only_view_cancels_nothing() {
    let known = known("web1");
    let mut state = State::new(true);
    press(&mut state, &known, KeyCode::Char('c'));
    assert!(state.question.is_none());
    assert_eq!(press(&mut state, &known, KeyCode::Char('y')), Wish::Nothing);
}

#[test]
fn names_cannot_write_to_the_terminal() {
    let shown = screen(&known("a\u{1b}[2Jb"), &State::new(false), 100, 30);
    assert!(!shown.contains('\u{1b}'), "{shown:?}");
}

#[test]
fn the_text_form_is_complete() {
    let names: Vec<String> = (0..60).map(|nth| format!("h{nth:02}")).collect();
    let hosts = names.iter().map(|name| host(name, &[])).collect();
    let known = Known::example(hosts, vec![moving("web1")], Vec::new(), Vec::new());
    let mut buffer = Buffer::empty(Rect::new(0, 0, 100, overview::height_of_text(&known, 100)));
    overview::draw_text(&known, buffer.area, &mut buffer);
    let text = lines(&buffer);
    for says in ["60 hosts · 0 VMs · 1 moving", "web1", "h00", "h59", "No migration has ended yet."]
    {
        assert!(text.contains(says), "no {says:?} in\n{text}");
    }
}
