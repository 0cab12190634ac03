//! `droveway completions`, and `droveway man`, which builds of packages use.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;
use client::Problem;

use super::Args;
use crate::output::print_raw;

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// The directory, which must exist
    directory: PathBuf,
}

pub(crate) fn run(args: &CompletionsArgs) -> Result<ExitCode, Problem> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "droveway", &mut script);
    print_raw(format_args!("{}", String::from_utf8_lossy(&script)))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes one page for `droveway` and one for each command.
pub(crate) fn man(args: &ManArgs) -> Result<ExitCode, Problem> {
    clap_mangen::generate_to(Args::command(), &args.directory).map_err(|source| {
        let what = format!("writing man pages to {}", args.directory.display());
        Problem::Local { what, source }
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_and_each_shell_a_script() {
        let directory = tempfile::tempdir().unwrap();
        man(&ManArgs { directory: directory.path().to_owned() }).unwrap();
        let page = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        assert!(page("droveway.1").contains("Moves running virtual machines between hosts"));
        let migrate = page("droveway-migrate.1");
        assert!(migrate.contains("downtime") && migrate.contains("130  ended by"), "{migrate}");
        assert!(page("droveway-ca-issue.1").contains("role"));
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "droveway", &mut script);
            assert!(String::from_utf8(script).unwrap().contains("evacuate"), "{shell}");
        }
    }
}
