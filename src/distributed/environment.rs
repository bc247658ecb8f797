//! The variables by which programs that start ranks give each process its place.

use super::ranks::{Ranks, Token};
use crate::{Error, Result};

/// The variables in which a program that starts ranks gives each one its place.
#[derive(Clone, Copy)]
struct Launcher {
    rank: &'static str,
    local_rank: &'static str,
    world_size: &'static str,
    /// How many ranks are on this host.
    local_world_size: Option<&'static str>,
    /// How many hosts there are, where that is set instead.
    hosts: Option<&'static str>,
}

const TORCHRUN: Launcher = Launcher {
    rank: "RANK",
    local_rank: "LOCAL_RANK",
    world_size: "WORLD_SIZE",
    local_world_size: Some("LOCAL_WORLD_SIZE"),
    hosts: None,
};
const OPEN_MPI: Launcher = Launcher {
    rank: "OMPI_COMM_WORLD_RANK",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    world_size: "OMPI_COMM_WORLD_SIZE",
    local_world_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
    hosts: None,
};
/// MPICH, Intel MPI, and `srun --mpi=pmi2`.
const PMI: Launcher = Launcher {
    rank: "PMI_RANK",
    local_rank: "MPI_LOCALRANKID",
    world_size: "PMI_SIZE",
    local_world_size: Some("MPI_LOCALNRANKS"),
    hosts: None,
};
const SLURM: Launcher = Launcher {
    rank: "SLURM_PROCID",
    local_rank: "SLURM_LOCALID",
    world_size: "SLURM_NTASKS",
    local_world_size: None,
    hosts: Some("SLURM_NNODES"),
};
/// Slurm's counts of one `srun`, which may start fewer ranks than its allocation has tasks.
const SLURM_STEP: Launcher = Launcher {
    world_size: "SLURM_STEP_NUM_TASKS",
    hosts: Some("SLURM_STEP_NUM_NODES"),
    ..SLURM
};

const MASTER: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];
/// Set by torchrun, whatever else started torchrun itself.
const TORCHRUN_ID: &str = "TORCHELASTIC_RUN_ID";
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// The job's secret.
pub(super) const TOKEN: &str = "TALLOW_JOB_TOKEN";
/// Names of a job, which are no secret; the first that is set.
const JOB_NAMES: [&str; 2] = [TORCHRUN_ID, "SLURM_JOB_ID"];

/// More ranks than any job has. Tables with a row for each are bounded by it.
const MAX_WORLD_SIZE: usize = 1 << 16;
const MAX_TOKEN_BYTES: usize = 256;
const START: &str = "start the ranks with torchrun, srun, mpirun, or with tallow's own launch";

/// Variables of other launchers around this process, which say nothing of the ranks that it starts.
#[cfg_attr(not(unix), allow(dead_code))] // of `launch`
pub(super) fn outer_variables() -> impl Iterator<Item = &'static str> {
    let launchers = [TORCHRUN, OPEN_MPI, PMI, SLURM, SLURM_STEP].into_iter();
    let variables = launchers.flat_map(|launcher| {
        let counts = [launcher.local_world_size, launcher.hosts];
        let names = [launcher.rank, launcher.local_rank, launcher.world_size];
        names.into_iter().chain(counts.into_iter().flatten())
    });
    variables.chain([TORCHRUN_ID, AGENT_STORE])
}

/// The place of this process that the variables of `lookup` say; `None` if it is not one of several.
pub(super) fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Ranks>> {
    let variables = Variables(lookup);
    let is_torchrun = variables.is_set(TORCHRUN.rank) && variables.is_set(TORCHRUN_ID);
    let launcher = variables.launcher().filter(|_| !is_torchrun);
    let torchrun = variables.first_of(&TORCHRUN);
    let outer = launcher.and_then(|launcher| variables.first_of(&launcher));
    let Some(because) = outer.or(torchrun) else {
        return Ok(None);
    };
    let most = MAX_WORLD_SIZE;
    let names = launcher.map(|launcher| [launcher.world_size, launcher.rank]);
    let [world_size, rank] = names.map_or([None; 2], |names| names.map(Some));
    let world_size = variables.agreed(TORCHRUN.world_size, world_size, 1..=most, because)?;
    let below = 0..=world_size - 1;
    let rank = variables.agreed(TORCHRUN.rank, rank, below.clone(), because)?;
    let local = launcher.map_or(TORCHRUN.local_rank, |launcher| launcher.local_rank);
    let local = match variables.is_set(TORCHRUN.local_rank) {
        true => TORCHRUN.local_rank,
        false => local,
    };
    let may_be_missing = world_size == 1 || local == PMI.local_rank;
    let local_rank = match variables.is_set(local) || !may_be_missing {
        true => variables.number(local, below, because)?,
        false => rank,
    };
    let mut master = variables.first_set(&MASTER);
    if launcher.is_none() {
        master = master.or(Some(because));
    }
    let is_one_host = variables.is_one_host(&launcher.unwrap_or(TORCHRUN), world_size);
    let mut master = match master {
        Some(because) if world_size > 1 => Some(variables.master(because)?),
        _ => None,
    };
    if let (Some((host, _)), true) = (&mut master, is_one_host) {
        *host = "127.0.0.1".into();
    }
    Ok(Some(Ranks {
        rank,
        local_rank,
        world_size,
        master,
        is_one_host,
        token: variables.token()?,
    }))
}

/// The environment, or a test's.
struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn is_set(&self, name: &str) -> bool {
        self.0(name).is_some()
    }

    fn first_set(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().find(|name| self.is_set(name)).copied()
    }

    /// The variable by which a launcher shows that it started this process as one of several, or as the only one.
    fn first_of(&self, launcher: &Launcher) -> Option<&'static str> {
        let several = || self.0(launcher.world_size).is_some_and(|size| size != "1");
        let place = self.first_set(&[launcher.rank, launcher.local_rank]);
        place.or_else(|| several().then_some(launcher.world_size))
    }

    /// The innermost program that started this process, of those that are not torchrun.
    fn launcher(&self) -> Option<Launcher> {
        let slurm = match self.is_set(SLURM_STEP.world_size) {
            true => SLURM_STEP,
            false => SLURM,
        };
        // A batch script has its job's count of tasks, and is none of them; `srun` numbers its steps.
        let is_batch = self.0("ENVIRONMENT").as_deref() == Some("BATCH");
        let is_script = is_batch && !self.is_set("SLURM_STEP_ID");
        let is_task = self.is_set(slurm.rank) && self.is_set(slurm.world_size) && !is_script;
        let mpi = [OPEN_MPI, PMI].into_iter();
        let mut mpi = mpi.filter(|launcher| self.first_of(launcher).is_some());
        mpi.next().or(is_task.then_some(slurm))
    }

    /// Whether the launcher says that all ranks are on this host.
    fn is_one_host(&self, launcher: &Launcher, world_size: usize) -> bool {
        let is = |name: Option<&str>, count: usize| {
            let value = name.and_then(&self.0);
            value.is_some_and(|value| value.parse() == Ok(count))
        };
        is(launcher.local_world_size, world_size) || is(launcher.hosts, 1)
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

    /// The number of torchrun's variable, or of the launcher's, which must be the same if both are set.
    fn agreed(
        &self,
        torchrun: &'static str,
        launcher: Option<&'static str>,
        range: std::ops::RangeInclusive<usize>,
        because: &str,
    ) -> Result<usize> {
        let Some(launcher) = launcher else {
            return self.number(torchrun, range, because);
        };
        if !self.is_set(torchrun) {
            return self.number(launcher, range, because);
        }
        // torchrun's may be of a smaller job: whether it can be says the launcher's.
        let of_torchrun = self.number(torchrun, 0..=MAX_WORLD_SIZE, because)?;
        let of_launcher = self.number(launcher, range, because)?;
        match of_torchrun == of_launcher {
            true => Ok(of_launcher),
            false => Err(environment(torchrun, of_torchrun).must_be(
                format!("{of_launcher}, as {launcher} is"),
                "unset the one that does not belong to this process, in the script that starts it",
            )),
        }
    }

    fn master(&self, because: &str) -> Result<(String, u16)> {
        let host = self.text("MASTER_ADDR", because)?;
        if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control()) {
            let error = environment("MASTER_ADDR", format!("{host:?}"));
            return Err(error.must_be("a host's name or address", "give it rank 0's host"));
        }
        // The agent's store has the port itself.
        let agent = self.0(AGENT_STORE).as_deref() == Some("True");
        let last = usize::from(u16::MAX - u16::from(agent));
        let port = self.number("MASTER_PORT", 1..=last, because)? as u16 + u16::from(agent);
        Ok((host, port))
    }

    fn token(&self) -> Result<Token> {
        if self.is_set(TOKEN) {
            return self.short(TOKEN).map(Token::Secret);
        }
        match self.first_set(&JOB_NAMES) {
            Some(name) => self.short(name).map(Token::Name),
            None => Ok(Token::Name(String::new())),
        }
    }

    fn short(&self, name: &'static str) -> Result<String> {
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

/// The error of a variable's value.
pub(super) fn environment(name: &'static str, got: impl std::fmt::Display) -> crate::error::Got {
    Error::config("environment", name, got)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &str) -> Result<Option<Ranks>> {
        let pairs: Vec<_> = (variables.split_whitespace())
            .map(|pair| pair.split_once('=').unwrap())
            .collect();
        read(|name| {
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
        assert_eq!(torchrun.token, Token::Name(String::new()));

        let agent = from(&format!("{TWO_OF_FOUR} TORCHELASTIC_USE_AGENT_STORE=True"));
        assert_eq!(agent.unwrap().unwrap().master.unwrap().1, 29501);

        let mpi = from(MPI).unwrap().unwrap();
        assert_eq!((place(&mpi), mpi.master), ((1, 1, 2), None));
        let mpi = from(&format!("{MPI} MASTER_ADDR=::1 MASTER_PORT=1"));
        assert_eq!(mpi.unwrap().unwrap().master, Some(("::1".into(), 1)));
        // torchrun under mpirun: the inner one started this process.
        let both = from(&format!("{MPI} {TWO_OF_FOUR} TORCHELASTIC_RUN_ID=none"));
        assert_eq!(both.unwrap().unwrap().rank, 2);

        let token = |more: &str| {
            from(&format!("{TWO_OF_FOUR} {more}"))
                .unwrap()
                .unwrap()
                .token
        };
        let name = |name: &str| Token::Name(name.into());
        let secret = |secret: &str| Token::Secret(secret.into());
        assert_eq!(token("SLURM_JOB_ID=7 TORCHELASTIC_RUN_ID=run"), name("run"));
        assert_eq!(token("SLURM_JOB_ID=7"), name("7"));
        assert_eq!(token("SLURM_JOB_ID=7 TALLOW_JOB_TOKEN="), secret(""));
        assert_eq!(
            token("TORCHELASTIC_RUN_ID=run TALLOW_JOB_TOKEN=s"),
            secret("s")
        );
    }

    const SLURM: &str = "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4";

    #[test]
    fn places_of_slurm_and_pmi_are_read() {
        let place = |variables: &str| {
            let ranks = from(variables).unwrap();
            ranks.map(|ranks| (ranks.rank, ranks.local_rank, ranks.world_size))
        };
        assert_eq!(place(SLURM), Some((3, 1, 4)));
        let ranks = from(SLURM).unwrap().unwrap();
        assert_eq!((ranks.master, ranks.is_one_host), (None, false));
        let with_master = format!("{SLURM} MASTER_ADDR=node-0 MASTER_PORT=29500");
        let master = from(&with_master).unwrap().unwrap().master;
        assert_eq!(master, Some(("node-0".into(), 29500)));
        // An srun of fewer tasks than the allocation, on one of its hosts.
        let step =
            "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=2 SLURM_NNODES=2";
        assert_eq!(place(step), Some((1, 1, 2)));
        let step = format!("{step} SLURM_STEP_NUM_NODES=1");
        assert!(from(&step).unwrap().unwrap().is_one_host);
        // srun in a batch script, and the script itself.
        let script = "ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4";
        assert_eq!(place(script), None);
        assert_eq!(place(&format!("{script} SLURM_STEP_ID=0")), Some((0, 0, 4)));
        // A shell of salloc.
        assert_eq!(place("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_NNODES=2"), None);
        assert_eq!(
            place("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1"),
            Some((0, 0, 1))
        );

        assert_eq!(place("PMI_RANK=1 PMI_SIZE=2"), Some((1, 1, 2)));
        assert_eq!(
            place("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1"),
            Some((3, 1, 4))
        );
        // mpirun's helpers are tasks of Slurm, and its ranks inherit their variables.
        assert_eq!(place(&format!("{MPI} {SLURM}")), Some((1, 1, 2)));
        // A script that gives torchrun's variables their values from Slurm's, and each rank one GPU.
        let same = format!("{SLURM} RANK=3 WORLD_SIZE=4 LOCAL_RANK=0");
        assert_eq!(place(&same), Some((3, 0, 4)));
        assert_eq!(place(&format!("{SLURM} WORLD_SIZE=4")), Some((3, 1, 4)));
    }

    #[test]
    fn a_single_process_is_no_job() {
        for variables in [
            "MASTER_ADDR=node-0",
            "MASTER_PORT=29500",
            "MASTER_ADDR=node-0 MASTER_PORT=what",
            "WORLD_SIZE=1",
            "WORLD_SIZE=1 MASTER_ADDR=node-0",
            "OMPI_COMM_WORLD_SIZE=1",
        ] {
            assert_eq!(from(variables).unwrap(), None, "{variables}");
        }
        let alone = from("RANK=0 WORLD_SIZE=1 MASTER_ADDR=node-0")
            .unwrap()
            .unwrap();
        assert_eq!((alone.rank, alone.local_rank, alone.world_size), (0, 0, 1));
    }

    #[test]
    fn variables_that_contradict_each_other_are_both_named() {
        for (variables, words) in [
            (
                format!("{SLURM} RANK=0 WORLD_SIZE=4"),
                "RANK must be 3, as SLURM_PROCID is, got 0",
            ),
            (
                format!("{SLURM} {TWO_OF_FOUR}"),
                "RANK must be 3, as SLURM_PROCID is, got 2",
            ),
            (
                format!("{SLURM} WORLD_SIZE=1"),
                "WORLD_SIZE must be 4, as SLURM_NTASKS is, got 1",
            ),
            (
                format!("{MPI} {TWO_OF_FOUR}"),
                "WORLD_SIZE must be 2, as OMPI_COMM_WORLD_SIZE is, got 4",
            ),
            (
                "PMI_RANK=0 PMI_SIZE=2 RANK=1".into(),
                "RANK must be 0, as PMI_RANK is, got 1",
            ),
        ] {
            let text = from(&variables).unwrap_err().to_string();
            assert!(text.contains(words), "{variables}: {text}");
        }
    }

    /// Ranks of one host meet there, whatever name it has.
    #[test]
    fn ranks_of_one_host_meet_on_loopback() {
        let here = format!("{TWO_OF_FOUR} LOCAL_WORLD_SIZE=4");
        let ranks = from(&here).unwrap().unwrap();
        assert_eq!(ranks.master, Some(("127.0.0.1".into(), 29500)));
        let slurm = format!("{SLURM} SLURM_NNODES=1 MASTER_ADDR=node-0 MASTER_PORT=1");
        let ranks = from(&slurm).unwrap().unwrap();
        assert_eq!(ranks.master, Some(("127.0.0.1".into(), 1)));
        let hosts = format!("{TWO_OF_FOUR} LOCAL_WORLD_SIZE=2 SLURM_NNODES=1");
        let ranks = from(&hosts).unwrap().unwrap();
        assert_eq!(ranks.master, Some(("node-0".into(), 29500)));
    }

    #[test]
    fn a_store_that_other_hosts_reach_has_a_secret() {
        let check = |more: &str, host: &str| {
            let ranks = from(&format!("{TWO_OF_FOUR} {more}")).unwrap().unwrap();
            ranks.check_secret(&(host.into(), 29500))
        };
        let secret = "TALLOW_JOB_TOKEN=0123456789abcdef";
        for (more, host, got) in [
            ("", "node-0", "got nothing"),
            ("TALLOW_JOB_TOKEN=", "10.0.0.1", "got nothing"),
            ("TALLOW_JOB_TOKEN=0123456789abcde", "node-0", "got 15 bytes"),
            ("TORCHELASTIC_RUN_ID=0123456789abcdef", "::", "got nothing"),
            ("SLURM_JOB_ID=0123456789abcdef", "0.0.0.0", "got nothing"),
        ] {
            let text = check(more, host).unwrap_err().to_string();
            let what = "TALLOW_JOB_TOKEN must be a secret of at least 16 bytes";
            assert!(text.contains(what) && text.contains(got), "{more}: {text}");
            assert!(
                text.contains("openssl rand -hex 16") && text.contains("each host"),
                "{text}"
            );
            check(secret, host).unwrap();
        }
        for host in ["localhost", "127.0.0.1", "::1"] {
            check("", host).unwrap();
        }
        let ranks = from(&format!("{TWO_OF_FOUR} {secret}")).unwrap().unwrap();
        assert!(!format!("{ranks:?}").contains("0123456789"), "{ranks:?}");
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
            ("WORLD_SIZE=2".into(), "RANK must be set, as WORLD_SIZE is"),
            (
                "OMPI_COMM_WORLD_SIZE=2".into(),
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
