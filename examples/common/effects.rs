//! Errors for flags that would be ignored. clap relates flags to flags (`requires`, `conflicts_with`); conditions on
//! their values are declared here. They are checked for flags on the command line, not for defaults.

use super::Common;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Parser};

/// Flags with the condition under which they have an effect.
struct Effect<F> {
    /// The flags' long names.
    flags: Vec<String>,
    /// The condition, in words.
    only: &'static str,
    holds: Box<dyn Fn(&F) -> bool>,
}

/// The conditions under which flags of a program have an effect.
pub struct Effects<F> {
    effects: Vec<Effect<F>>,
    command: Command,
}

impl<F: Parser + 'static> Effects<F> {
    pub fn new() -> Self {
        Self {
            effects: Vec::new(),
            command: F::command(),
        }
    }

    /// Changes the program's help or the defaults of its flags.
    pub fn with_command(mut self, change: impl FnOnce(Command) -> Command) -> Self {
        self.command = change(self.command);
        self
    }

    /// Declares that `flags` have an effect only if `holds` returns true; `only` states this condition in words.
    pub fn only(
        self,
        only: &'static str,
        flags: &'static [&'static str],
        holds: impl Fn(&F) -> bool + 'static,
    ) -> Self {
        self.with(only, flags.iter().copied(), holds)
    }

    /// Declares the same of every flag of the group `G`.
    pub fn only_group<G: Args>(
        self,
        only: &'static str,
        holds: impl Fn(&F) -> bool + 'static,
    ) -> Self {
        let group = G::augment_args(Command::new(""));
        self.with(only, group.get_arguments().filter_map(Arg::get_long), holds)
    }

    fn with<'a>(
        mut self,
        only: &'static str,
        flags: impl Iterator<Item = &'a str>,
        holds: impl Fn(&F) -> bool + 'static,
    ) -> Self {
        self.effects.push(Effect {
            flags: flags.map(String::from).collect(),
            only,
            holds: Box::new(holds),
        });
        self
    }

    /// Parses the command line. On an error the program ends with clap's status and message, or with a message that
    /// names a flag that would be ignored.
    pub fn parse(self) -> F {
        let help = Arg::new("help").short('h').long("help").help("Print help");
        let all = Arg::new("help_all")
            .long("help-all")
            .help("Print help on all flags");
        let mut command = self
            .command
            .max_term_width(100)
            .disable_help_flag(true)
            .mut_args(|arg| arg.hide_possible_values(true)) // the help text names them
            .arg(help.action(ArgAction::HelpShort))
            .arg(all.action(ArgAction::HelpLong));
        let matches = command.get_matches_mut();
        let flags = F::from_arg_matches(&matches);
        let flags = flags.unwrap_or_else(|error| error.format(&mut command).exit());
        for Effect {
            flags: names,
            only,
            holds,
        } in &self.effects
        {
            let given = names.iter().find(|name| is_given(&command, &matches, name));
            if let (Some(name), false) = (given, holds(&flags)) {
                let text = format!("--{name} would be ignored: it has an effect only {only}");
                command.error(ErrorKind::ArgumentConflict, text).exit();
            }
        }
        flags
    }
}

/// Returns whether the common flags name a GPU.
pub fn names_gpu(common: &Common) -> bool {
    !common.device.eq_ignore_ascii_case("cpu")
}

/// Returns whether a flag is on the command line. Panics if the program does not declare it.
fn is_given(command: &Command, matches: &ArgMatches, name: &str) -> bool {
    let mut arguments = command.get_arguments();
    let argument = arguments.find(|argument| argument.get_long() == Some(name));
    let argument = argument.unwrap_or_else(|| panic!("there is no flag --{name}"));
    matches.value_source(argument.get_id().as_str()) == Some(ValueSource::CommandLine)
}
