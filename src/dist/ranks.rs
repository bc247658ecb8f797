//! A process's place in its job, as the program that started it says.

use crate::{Error, Result};

/// As in torchrun's variables.
const TORCHRUN: [&str; 3] = ["RANK", "LOCAL_RANK", "WORLD_SIZE"];
const MASTER: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];
/// The same of Open MPI's `mpirun`.
const OPEN_MPI: [&str; 3] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
];
/// Where a job's token is, the first that is set.
const TOKENS: [&str; 3] = ["TALLOW_JOB_TOKEN", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"];

/// More ranks than any job has. Tables with a row for each are bounded by it.
const MAX_WORLD_SIZE: usize = 1 << 16;
const MAX_TOKEN_BYTES: usize = 256;

const START: &str = "start the ranks with torchrun, with mpirun, or with tallow's own launch";

/// A process's place in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ranks {
    /// This process, from 0 to `world_size`.
    pub rank: usize,
    /// Its number among the processes of its host: the GPU that it takes.
    pub local_rank: usize,
    /// How many processes there are.
    pub world_size: usize,
    /// Host and port where rank 0's store listens. Under mpirun there need not be one.
    pub master: Option<(String, u16)>,
    /// What the processes of one job have in common, and no others: may be empty.
    pub(crate) token: String,
}

impl Ranks {
    /// Reads the place from the environment; `None` if this process is not one of several.
    ///
    /// - torchrun's `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. Where torchrun's agent keeps a
    ///   store of its own on that port (`TORCHELASTIC_USE_AGENT_STORE=True`), ours listens on the one after it.
    /// - Where the first three are not set, Open MPI's `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_LOCAL_RANK` and
    ///   `OMPI_COMM_WORLD_SIZE`. `MASTER_ADDR` and `MASTER_PORT` may be missing then.
    /// - The job's token, which keeps jobs on one port apart, is `TALLOW_JOB_TOKEN`, else `TORCHELASTIC_RUN_ID`, else
    ///   `SLURM_JOB_ID`, else empty. It travels in the clear: it helps against mistakes, not against eavesdroppers.
    ///
    /// # Errors
    /// [`Error::Config`] naming the variable that is missing beside others, or has a value that cannot be.
    pub fn from_env() -> Result<Option<Self>> {
        // What is not Unicode becomes text that no check passes, instead of a variable that seems missing.
        Self::from_lookup(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let variables = Variables(lookup);
        let torchrun = variables.first_set(&TORCHRUN);
        let open_mpi = variables.first_set(&OPEN_MPI);
        let master = variables.first_set(&MASTER);
        let (names, because) = match (torchrun, open_mpi, master) {
            (Some(set), _, _) => (TORCHRUN, set),
            (None, Some(set), _) => (OPEN_MPI, set),
            (None, None, Some(set)) => (TORCHRUN, set),
            (None, None, None) => return Ok(None),
        };
        let world_size = variables.number(names[2], 1..=MAX_WORLD_SIZE, because)?;
        let below = 0..=world_size - 1;
        Ok(Some(Self {
            rank: variables.number(names[0], below.clone(), because)?,
            local_rank: variables.number(names[1], below, because)?,
            world_size,
            master: match master.or(torchrun) {
                Some(because) => Some(variables.master(because)?),
                None => None,
            },
            token: variables.token()?,
        }))
    }
}

/// The environment, or a test's.
struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn first_set(&self, names: &[&'static str]) -> Option<&'static str> {
        let is_set = |name: &&&'static str| self.0(name).is_some();
        names.iter().find(is_set).copied()
    }

    /// A variable that must be there `because` another is.
    fn text(&self, name: &'static str, because: &str) -> Result<String> {
        let missing =
            || environment(name, "nothing").must_be(format!("set, as {because} is"), START);
        self.0(name).ok_or_else(missing)
    }

    fn number(
        &self,
        name: &'static str,
        range: std::ops::RangeInclusive<usize>,
        because: &str,
    ) -> Result<usize> {
        let text = self.text(name, because)?;
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            let (first, last) = range.into_inner();
            environment(name, text).must_be(format!("a number from {first} to {last}"), START)
        })
    }

    fn master(&self, because: &str) -> Result<(String, u16)> {
        let host = self.text("MASTER_ADDR", because)?;
        if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control()) {
            let error = environment("MASTER_ADDR", format!("{host:?}"));
            return Err(error.must_be("a host's name or address", "give it rank 0's host"));
        }
        // The agent's store has the port itself.
        let agent = self.0("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        let last = usize::from(u16::MAX - u16::from(agent));
        let port = self.number("MASTER_PORT", 1..=last, because)? as u16 + u16::from(agent);
        Ok((host, port))
    }

    fn token(&self) -> Result<String> {
        let Some(name) = self.first_set(&TOKENS) else {
            return Ok(String::new());
        };
        let token = self.text(name, name)?;
        if token.len() > MAX_TOKEN_BYTES {
            let error = environment(name, format!("{} bytes", token.len()));
            return Err(error.must_be(
                format!("at most {MAX_TOKEN_BYTES} bytes long"),
                "set TALLOW_JOB_TOKEN to something short, the same on all ranks",
            ));
        }
        Ok(token)
    }
}

fn environment(name: &'static str, got: impl std::fmt::Display) -> crate::error::Field {
    Error::config("environment", name, got)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &str) -> Result<Option<Ranks>> {
        let pairs: Vec<_> = (variables.split_whitespace())
            .map(|pair| pair.split_once('=').unwrap())
            .collect();
        Ranks::from_lookup(|name| {
            let (_, value) = pairs.iter().find(|(key, _)| *key == name)?;
            Some((*value).to_string())
        })
    }

    const TWO_OF_FOUR: &str =
        "RANK=2 LOCAL_RANK=0 WORLD_SIZE=4 MASTER_ADDR=node-0 MASTER_PORT=29500";
    const MPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=2";

    #[test]
    fn places_are_read() {
        assert_eq!(from("").unwrap(), None);
        assert_eq!(from("SLURM_JOB_ID=7").unwrap(), None);

        let torchrun = from(TWO_OF_FOUR).unwrap().unwrap();
        let place = |ranks: &Ranks| (ranks.rank, ranks.local_rank, ranks.world_size);
        assert_eq!(place(&torchrun), (2, 0, 4));
        assert_eq!(torchrun.master, Some(("node-0".into(), 29500)));
        assert_eq!(torchrun.token, "");

        let agent = from(&format!("{TWO_OF_FOUR} TORCHELASTIC_USE_AGENT_STORE=True"));
        assert_eq!(agent.unwrap().unwrap().master.unwrap().1, 29501);

        let mpi = from(MPI).unwrap().unwrap();
        assert_eq!((place(&mpi), mpi.master), ((1, 1, 2), None));
        let mpi = from(&format!("{MPI} MASTER_ADDR=::1 MASTER_PORT=1"));
        assert_eq!(mpi.unwrap().unwrap().master, Some(("::1".into(), 1)));
        // torchrun under mpirun: the inner one started this process.
        let both = from(&format!("{MPI} {TWO_OF_FOUR}")).unwrap().unwrap();
        assert_eq!(both.rank, 2);

        let token = |more: &str| {
            from(&format!("{TWO_OF_FOUR} {more}"))
                .unwrap()
                .unwrap()
                .token
        };
        assert_eq!(token("SLURM_JOB_ID=7 TORCHELASTIC_RUN_ID=run"), "run");
        assert_eq!(token("SLURM_JOB_ID=7 TALLOW_JOB_TOKEN="), "");
    }

    #[test]
    fn what_cannot_be_is_named() {
        let with = |change: &str| {
            let (name, _) = change.split_once('=').unwrap();
            let kept = TWO_OF_FOUR
                .split(' ')
                .filter(|pair| pair.split('=').next() != Some(name));
            kept.chain([change]).collect::<Vec<_>>().join(" ")
        };
        let long = format!("TALLOW_JOB_TOKEN={}", "x".repeat(257));
        for (variables, words) in [
            ("RANK=0".to_string(), "WORLD_SIZE must be set, as RANK is"),
            ("RANK=0 WORLD_SIZE=2".into(), "LOCAL_RANK must be set"),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0".into(),
                "MASTER_ADDR must be set",
            ),
            (
                format!("{MPI} MASTER_ADDR=a"),
                "MASTER_PORT must be set, as MASTER_ADDR is",
            ),
            (
                "MASTER_PORT=1".into(),
                "WORLD_SIZE must be set, as MASTER_PORT is",
            ),
            (
                "OMPI_COMM_WORLD_SIZE=1".into(),
                "OMPI_COMM_WORLD_RANK must be set",
            ),
            (with("RANK=4"), "RANK must be a number from 0 to 3, got 4"),
            (with("RANK=-1"), "got -1"),
            (with("RANK="), "RANK must be"),
            (
                with("LOCAL_RANK=4"),
                "LOCAL_RANK must be a number from 0 to 3",
            ),
            (with("WORLD_SIZE=0"), "WORLD_SIZE must be a number from 1"),
            (
                with("WORLD_SIZE=99999999999999999999"),
                "WORLD_SIZE must be",
            ),
            (
                with("MASTER_PORT=65536"),
                "MASTER_PORT must be a number from 1 to 65535",
            ),
            (
                with("MASTER_PORT=65535") + " TORCHELASTIC_USE_AGENT_STORE=True",
                "1 to 65534",
            ),
            (with("MASTER_ADDR="), "MASTER_ADDR must be a host's name"),
            (with(&long), "TALLOW_JOB_TOKEN must be at most 256"),
        ] {
            let text = from(&variables).unwrap_err().to_string();
            assert!(text.contains(words), "{variables}: {text}");
        }
    }
}
