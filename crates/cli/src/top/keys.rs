//! The effects of keys.

use client::cluster::{Known, Running};
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// A tab of the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tab {
    Overview,
    Hosts,
    Vms,
    History,
}

impl Tab {
    pub(super) const ALL: [(Self, &'static str); 4] = [
        (Self::Overview, "1 Overview"),
        (Self::Hosts, "2 Hosts"),
        (Self::Vms, "3 VMs"),
        (Self::History, "4 History"),
    ];

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|(tab, _)| *tab == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()].0
    }
}

/// A question; any answer but `y` means no.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) text: String,
    agent: usize,
    id: String,
}

/// The action that a key requests.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Nothing,
    Leave,
    Cancel { agent: usize, id: String },
}

/// The state of the screen.
pub(super) struct State {
    pub(super) tab: Tab,
    /// The migration that keys act on.
    chosen: Option<String>,
    /// The rows of a long table that are above the screen.
    pub(super) above: usize,
    pub(super) question: Option<Question>,
    /// The result of the last action.
    pub(super) said: Option<String>,
    pub(super) read_only: bool,
}

/// Rows that Page Up and Page Down move by.
const PAGE: isize = 10;

impl State {
    pub(super) fn new(read_only: bool) -> Self {
        let tab = Tab::Overview;
        Self { tab, chosen: None, above: 0, question: None, said: None, read_only }
    }

    pub(super) fn say(&mut self, text: String) {
        self.said = Some(text);
    }

    /// The row of the chosen migration; the first row if that one no longer runs.
    pub(super) fn chosen(&self, running: &[Running<'_>]) -> Option<usize> {
        let chosen = self.chosen.as_deref();
        let at = running.iter().position(|one| Some(one.progress.id.as_str()) == chosen);
        at.or_else(|| (!running.is_empty()).then_some(0))
    }

    pub(super) fn take(&mut self, event: &Event, known: &Known) -> Wish {
        match event {
            Event::Key(key) if key.kind == KeyEventKind::Press => self.press(*key, known),
            _ => Wish::Nothing,
        }
    }

    fn press(&mut self, key: KeyEvent, known: &Known) -> Wish {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            let leaves = matches!(key.code, KeyCode::Char('c' | 'd'));
            return if leaves { Wish::Leave } else { Wish::Nothing };
        }
        self.said = None;
        if let Some(Question { agent, id, .. }) = self.question.take() {
            let yes = matches!(key.code, KeyCode::Char('y' | 'Y'));
            return if yes { Wish::Cancel { agent, id } } else { Wish::Nothing };
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Wish::Leave,
            KeyCode::Char('1') => self.show(Tab::Overview),
            KeyCode::Char('2') => self.show(Tab::Hosts),
            KeyCode::Char('3') => self.show(Tab::Vms),
            KeyCode::Char('4') => self.show(Tab::History),
            KeyCode::Tab => self.show(self.tab.next()),
            KeyCode::Up | KeyCode::Char('k') => self.go(-1, known),
            KeyCode::Down | KeyCode::Char('j') => self.go(1, known),
            KeyCode::PageUp => self.go(-PAGE, known),
            KeyCode::PageDown => self.go(PAGE, known),
            KeyCode::Home => self.go(isize::MIN, known),
            KeyCode::End => self.go(isize::MAX, known),
            KeyCode::Char('c') if self.tab == Tab::Overview => self.ask_to_cancel(known),
            _ => {}
        }
        Wish::Nothing
    }

    fn show(&mut self, tab: Tab) {
        if self.tab != tab {
            (self.tab, self.above) = (tab, 0);
        }
    }

    /// Chooses another migration in the overview; scrolls elsewhere.
    fn go(&mut self, rows: isize, known: &Known) {
        let moved = |at: usize, last: usize| at.saturating_add_signed(rows).min(last);
        if self.tab == Tab::Overview {
            let running = known.running();
            let at = self.chosen(&running).map(|at| moved(at, running.len() - 1));
            self.chosen = at.map(|at| running[at].progress.id.clone());
        } else {
            let all = match self.tab {
                Tab::Overview | Tab::Hosts => known.hosts.len(),
                Tab::Vms => known.vms().count(),
                Tab::History => known.history().len(),
            };
            self.above = moved(self.above, all.saturating_sub(1));
        }
    }

    fn ask_to_cancel(&mut self, known: &Known) {
        let running = known.running();
        let Some(one) = self.chosen(&running).map(|at| running[at]) else { return };
        if self.read_only {
            self.say("Nothing is changed from here.".to_owned());
            return;
        }
        let coordinator = |gang: &str| Some((known.coordinator(gang)?, gang.to_owned()));
        if let Some(agent) = one.agent {
            let (vm, id) = (&one.progress.vm, one.progress.id.clone());
            let text = format!("Cancel the move of {vm}? It stays at {}. y/n", one.progress.from);
            self.question = Some(Question { text, agent, id });
        } else if let Some((agent, id)) = one.gang.and_then(coordinator) {
            let text = format!("Cancel gang {id}? VMs that have not moved stay. y/n");
            self.question = Some(Question { text, agent, id });
        }
        // The choice stays with this migration, even if rows above it change.
        self.chosen = Some(one.progress.id.clone());
    }
}
