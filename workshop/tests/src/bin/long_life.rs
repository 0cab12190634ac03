//! `long-life [MOVES]`: moves a VM under load to and fro, 200 times by default, with a reboot after
//! every tenth move, and fails if the agents hold more after that than after the first twenty.

use std::process::ExitCode;

use end_to_end::long_life;

const MOVES: usize = 200;

fn main() -> ExitCode {
    let moves = std::env::args().nth(1).map_or(Ok(MOVES), |text| text.parse());
    match moves {
        Ok(moves) if moves > 0 && moves.is_multiple_of(2) => {
            long_life::live(moves);
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("long-life: say how many moves, an even number: long-life 200");
            ExitCode::FAILURE
        }
    }
}
