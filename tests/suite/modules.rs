//! The order of the crate's modules: each uses only earlier ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Every module of `src`, lower ones first.
const ORDER: [&str; 30] = [
    "error",
    "grad",
    "init",
    "probe",
    "kernels",
    "hardware",
    "inplace",
    "saved",
    "gradients",
    "graph",
    "files",
    "precision",
    "ops",
    "backward",
    "attention",
    "nn",
    "model",
    "hf",
    "distributed",
    "optim",
    "op_table",
    "data",
    "report",
    "compile",
    "memory",
    "profile",
    "bench",
    "train",
    "guide",
    "internals",
];

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the first names of the paths after each `crate::` in code; of `crate::{a, b::c}` each path's.
fn names_from_the_root(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    let name_of = |path: &str| -> String {
        let is_of_a_name = |c: &char| c.is_alphanumeric() || *c == '_';
        path.trim().chars().take_while(is_of_a_name).collect()
    };
    for (at, prefix) in code.match_indices("crate::") {
        let rest = &code[at + prefix.len()..];
        let Some(list) = rest.strip_prefix('{') else {
            names.push(name_of(rest));
            continue;
        };
        let (mut depth, mut start) = (0, 0);
        for (i, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    names.push(name_of(&list[start..i]));
                    start = i + 1;
                    if c == '}' {
                        break;
                    }
                }
                _ => {}
            }
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// Returns the module of each name that `lib.rs` reexports at the root.
fn reexports(lib: &str) -> BTreeMap<String, String> {
    let mut modules = BTreeMap::new();
    let uses = lib.lines().filter_map(|line| line.strip_prefix("pub use "));
    for (module, names) in uses.filter_map(|path| path.split_once("::")) {
        for name in names.trim_matches(['{', '}', ';']).split(", ") {
            modules.insert(name.trim_matches(['{', '}', ';']).into(), module.into());
        }
    }
    modules
}

#[test]
fn lower_modules_know_nothing_of_higher_ones() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let lib = fs::read_to_string(src.join("lib.rs")).unwrap();
    let reexports = reexports(&lib);
    let place = |module: &str| ORDER.iter().position(|other| *other == module);
    let mut files = Vec::new();
    rust_files(&src, &mut files);
    let mut upward: BTreeMap<(String, String), BTreeSet<PathBuf>> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for file in files {
        let path = file.strip_prefix(&src).unwrap().to_path_buf();
        let first = path.components().next().unwrap().as_os_str();
        let module = first.to_str().unwrap().trim_end_matches(".rs").to_string();
        let is_test = path
            .iter()
            .any(|part| part == "tests" || part == "tests.rs");
        if module == "lib" || is_test {
            continue; // a test may use anything
        }
        let from = place(&module).unwrap_or_else(|| panic!("give {module} a place in ORDER"));
        seen.insert(module.clone());
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let lines = code.lines().map(|line| line.split("//").next().unwrap());
        let code: Vec<&str> = lines.collect();
        for name in names_from_the_root(&code.join("\n")) {
            let target = reexports.get(&name).unwrap_or(&name);
            let to = place(target).unwrap_or_else(|| panic!("{name} in {}", path.display()));
            if to > from {
                let users = upward.entry((module.clone(), target.clone()));
                users.or_default().insert(path.clone());
            }
        }
    }
    assert_eq!(seen.len(), ORDER.len(), "a module of ORDER is gone");
    assert!(
        upward.is_empty(),
        "modules that use later ones: {upward:#?}"
    );
}
