//! Commands whose output has no reader any more, as behind `| head`.

use std::process::Command;

#[test]
fn the_exit_code_says_what_was_done() {
    for (args, code) in [("completions bash", 0), ("list --api /nowhere/api.sock", 1)] {
        let (reader, closed) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_droveway"));
        command.args(args.split(' ')).stdout(closed.try_clone().unwrap()).stderr(closed);
        assert_eq!(command.status().unwrap().code(), Some(code), "{args}");
    }
}
