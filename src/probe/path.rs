//! Paths: chains of names that tell where in a model something happens.

use std::collections::HashMap;
use std::fmt;
use std::sync::{LazyLock, Mutex, MutexGuard};

/// A place in a program, as the names of the ranges around it: `layers.0/attn/q_proj/linear`.
///
/// It is a small number that stands for the names, which are stored until the process ends. It can be copied, compared,
/// and written where nothing may be allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Path(u32);

/// All paths so far. A path's number is its index, and its parent's index is smaller.
struct Paths {
    /// Parent and own name. The root is its own parent.
    nodes: Vec<(Path, String)>,
    numbers: HashMap<(Path, String), Path>,
}

static PATHS: LazyLock<Mutex<Paths>> = LazyLock::new(|| {
    Mutex::new(Paths {
        nodes: vec![(Path::ROOT, String::new())],
        numbers: HashMap::new(),
    })
});

fn paths() -> MutexGuard<'static, Paths> {
    PATHS.lock().unwrap_or_else(|e| e.into_inner())
}

impl Path {
    /// The path outside of all ranges.
    pub const ROOT: Self = Self(0);

    /// Returns the path of a range called `name` in this path.
    pub fn child(self, name: &str) -> Self {
        let mut paths = paths();
        let key = (self, name.to_string());
        if let Some(known) = paths.numbers.get(&key) {
            return *known;
        }
        let child = Self(paths.nodes.len() as u32);
        paths.nodes.push(key.clone());
        paths.numbers.insert(key, child);
        child
    }

    /// Returns the path around this one; `None` for the root.
    pub fn parent(self) -> Option<Self> {
        (self != Self::ROOT).then(|| paths().nodes[self.0 as usize].0)
    }

    /// Returns the path of the first name alone; the root for the root.
    pub fn outermost(self) -> Self {
        let paths = paths();
        let mut path = self;
        loop {
            match paths.nodes[path.0 as usize].0 {
                Self::ROOT => return path,
                parent => path = parent,
            }
        }
    }

    /// Returns the last name; empty for the root.
    pub fn name(self) -> String {
        paths().nodes[self.0 as usize].1.clone()
    }

    /// Returns all names, the outermost first.
    pub fn names(self) -> Vec<String> {
        let paths = paths();
        let mut names = Vec::new();
        let mut path = self;
        while path != Self::ROOT {
            let (parent, name) = &paths.nodes[path.0 as usize];
            names.push(name.clone());
            path = *parent;
        }
        names.reverse();
        names
    }
}

/// Writes the names with slashes between them; `-` for the root.
impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ROOT => f.pad("-"),
            path => f.pad(&path.names().join("/")),
        }
    }
}
