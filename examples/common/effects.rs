//! Errors for flags that would be ignored. clap relates flags to flags (`requires`, `conflicts_with`); conditions on
//! their values are declared here. They are checked for flags on the command line, not for defaults.

use super::Common;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, Args, Command, Parser};

/// Flags with the condition under which they have an effect.
pub struct Effect {
    /// The condition, in words.
    only: String,
    holds: bool,
    /// The flags' long names.
    flags: Vec<String>,
}

/// Declares that `flags` have an effect only under a condition, which is stated in words.
pub fn only(only: impl Into<String>, holds: bool, flags: &[&str]) -> Effect {
    Effect {
        only: only.into(),
        holds,
        flags: flags.iter().map(|flag| flag.to_string()).collect(),
    }
}

/// Declares the same of every flag of the group `G`.
pub fn only_group<G: Args>(condition: impl Into<String>, holds: bool) -> Effect {
    let group = G::augment_args(Command::new(""));
    let flags: Vec<&str> = group.get_arguments().filter_map(Arg::get_long).collect();
    only(condition, holds, &flags)
}

/// Parses the command line of a program. On an error the program ends with clap's status and message, or with a message
/// that names a flag that would be ignored.
pub fn parse<F: Parser>(command: Command, effects: impl FnOnce(&F) -> Vec<Effect>) -> F {
    let help = Arg::new("help").short('h').long("help").help("Print help");
    let all = Arg::new("help_all").long("help-all");
    let all = all.help("Print help on all flags");
    let mut command = command
        .max_term_width(100)
        .disable_help_flag(true)
        .mut_args(|arg| arg.hide_possible_values(true)) // the help text names them
        .arg(help.action(ArgAction::HelpShort))
        .arg(all.action(ArgAction::HelpLong));
    let matches = command.get_matches_mut();
    let flags = F::from_arg_matches(&matches);
    let flags = flags.unwrap_or_else(|error| error.format(&mut command).exit());
    // A flag's field has its name; clap panics on a name that the program does not declare.
    let source = |name: &str| matches.value_source(&name.replace('-', "_"));
    let is_given = |name: &&String| source(name) == Some(ValueSource::CommandLine);
    for Effect { only, holds, flags } in effects(&flags) {
        if let (Some(name), false) = (flags.iter().find(is_given), holds) {
            let text = format!("--{name} would be ignored: it has an effect only {only}");
            command.error(ErrorKind::ArgumentConflict, text).exit();
        }
    }
    flags
}

/// Returns whether the common flags name a GPU.
pub fn names_gpu(common: &Common) -> bool {
    !common.device.eq_ignore_ascii_case("cpu")
}
