//! `long-life [MOVES] [debian]`: moves a VM under load to and fro, 200 times by default, with a reboot
//! after every tenth move, and fails if the agents hold more after that than after the first twenty.
//! With `debian` it is one of the field lab, whose reboots take half a minute of a core each.

use std::process::ExitCode;

use end_to_end::long_life;

const MOVES: usize = 200;

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let is_debian = words.last().is_some_and(|word| word == "debian");
    if is_debian {
        words.pop();
    }
    let moves = words.first().map_or(Ok(MOVES), |text| text.parse());
    let moves = match moves {
        Ok(moves) if moves > 0 && moves.is_multiple_of(2) => moves,
        _ => {
            eprintln!("long-life: how many moves is missing, an even number: long-life 200");
            return ExitCode::FAILURE;
        }
    };
    if !is_debian {
        long_life::live(moves);
    } else if let Err(error) = long_life::live_as_debian(moves) {
        eprintln!("long-life: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
