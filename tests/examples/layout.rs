//! The layout of each example's output, at the width of the terminal.

use super::process::{example, report, run};
use super::stdout::SHORT;
use serde_json::Value;

/// The longest note allowed, in characters.
const NOTE_CHARS: usize = 200;

/// Command lines that print tables: the short runs except `train`, and variants that print other tables.
fn commands() -> Vec<&'static str> {
    let all = SHORT.into_iter().filter(|line| !line.starts_with("train "));
    let others = [
        "attention_benchmark --module --sequence-length 8 --d-model 16 512 --iterations 2 --warmup-steps 0",
        "attention_benchmark --module --sequence-length 8 16 --d-model 128 --batch-size 2 --iterations 2 --compare naive flash \
         planned planned-flash --precision f32 bf16 --num-heads 1 2",
        "attention_benchmark --sequence-length 8 16 2048 --head-dim 8 --iterations 2 --compare naive flash planned \
         planned-flash --memory-limit-gib 0.1",
        "compiled_benchmark --config 1-8-16-1-2 2-8-16-1-2 --steps 2 --rounds 1 --vocab-size 100 --d-ff 24",
        "distributed_benchmark SMALL --part paper accounting --strategy replicated sharded-optimizer fully-shard \
         --bucket-mib 1 --product-tflops 600 --memory-gb-s 4000 --reduce-gb-s 330 150 120 --gather-gb-s 190 \
         --alone-ms 2 --contention 0.4",
        "e2e_benchmark SMALL --mode all --steps 2 --warmup-steps 0 1 2 --isolate",
        "e2e_benchmark SMALL --mode all --steps 2 --compile --precision f32 bf16",
        "e2e_benchmark SMALL --mode all --steps 2 --view phases",
        "e2e_benchmark --size 2.7b --memory-limit-gib 1 --steps 2",
        "memory_estimate SMALL --mode all --attention naive flash",
        "memory_estimate SMALL --compile --precision bf16 --world-size 4 --strategy fully-shard",
        "memory_profile SMALL --mode all --compile --precision f32 bf16",
        "memory_profile --size 2.7b --memory-limit-gib 1",
        "mixed_precision_benchmark SMALL --mode all --steps 2 --rounds 1 --precision bf16-dropping-casts",
        "profile SMALL --mode all --steps 2 --compile",
    ];
    all.chain(others).collect()
}

#[test]
fn the_header_of_training_fits_the_terminal() {
    let line = SHORT
        .into_iter()
        .find(|line| line.starts_with("train "))
        .unwrap();
    let mut command = example(line);
    command.env("COLUMNS", "80");
    let ended = run(command);
    let mut lines = ended.out.lines();
    let header: Vec<&str> = lines
        .by_ref()
        .take_while(|line| !line.starts_with("step "))
        .collect();
    assert!(
        header.iter().any(|line| line.contains("schedule:")),
        "{header:?}"
    );
    for line in header {
        assert!(line.chars().count() <= 80 && !line.contains("{ "), "{line}");
    }
}

/// `COLUMNS=0` means an unknown width, as in terminals and shells.
#[test]
fn a_width_of_zero_is_an_unknown_one() {
    let printed = |columns: Option<&str>| {
        let mut command = example("toy_model_dtypes");
        match columns {
            Some(columns) => command.env("COLUMNS", columns),
            None => command.env_remove("COLUMNS"),
        };
        run(command).out
    };
    assert_eq!(printed(Some("0")), printed(None));
    assert!(printed(None).lines().any(|line| line.len() > 20));
}

#[test]
fn no_line_is_longer_than_the_terminal() {
    for line in commands() {
        for width in [80, 100, 160] {
            let mut command = example(line);
            command.env("COLUMNS", width.to_string());
            let ended = run(command);
            assert_eq!((ended.status, ended.err.as_str()), (Some(0), ""), "{line}");
            for printed in ended.out.lines() {
                let length = printed.chars().count();
                assert!(length <= width, "{line}: {length} of {width}: {printed}");
            }
            for odd in [
                "\"",
                "Some(",
                "None",
                " 1 shapes",
                " 1 steps",
                " 1 calls",
                " 1 configurations",
            ] {
                assert!(!ended.out.contains(odd), "{line}: {odd} in {}", ended.out);
            }
        }
    }
}

#[test]
fn notes_are_short_sentences() {
    fn check(line: &str, report: &Value) {
        for note in report["notes"].as_array().into_iter().flatten() {
            let note = note.as_str().unwrap();
            let length = note.chars().count();
            assert!(length <= NOTE_CHARS, "{line}: {length} characters: {note}");
            assert!(note.ends_with('.'), "{line}: {note}");
        }
        for detail in report["details"].as_array().into_iter().flatten() {
            check(line, detail);
        }
    }
    for line in commands() {
        check(line, &report(line));
    }
}

/// The title and columns of every table of every example equal those in tables.txt.
#[test]
fn every_table_has_its_columns() {
    let mut tables = String::new();
    for line in commands() {
        let ended = run(example(&format!("{line} --format markdown")));
        tables.push_str(&format!("{line}\n"));
        let lines: Vec<&str> = ended.out.lines().collect();
        for (i, rule) in lines
            .iter()
            .enumerate()
            .filter(|(_, line)| line.starts_with("| --"))
        {
            let before = lines[..i - 1].iter().rev().find(|line| !line.is_empty());
            let title = before.and_then(|line| line.strip_prefix("**")?.strip_suffix("**"));
            let title = title.filter(|title| !["Configuration", "Environment"].contains(title));
            let columns: Vec<&str> = lines[i - 1]
                .trim_matches('|')
                .split('|')
                .map(str::trim)
                .collect();
            assert_eq!(columns.len() + 1, rule.matches('|').count(), "{line}");
            // The parts of the memory depend on the machine, and so do numbers in titles.
            let mut columns: Vec<&str> = columns
                .into_iter()
                .map(|column| {
                    ["By kind", "Difference"]
                        .into_iter()
                        .find(|of| column.starts_with(of))
                        .unwrap_or(column)
                })
                .collect();
            columns.dedup();
            let title = title
                .unwrap_or("-")
                .replace(|c: char| c.is_ascii_digit(), "#");
            let figures = ["##", "#,#", "#.#"];
            let is_masked = |title: &String| figures.iter().any(|f| title.contains(f));
            let title = std::iter::successors(Some(title), |title| {
                let shorter = title
                    .replace("##", "#")
                    .replace("#,#", "#")
                    .replace("#.#", "#");
                is_masked(title).then_some(shorter)
            });
            let title = title.last().unwrap_or_default();
            tables.push_str(&format!("  {title}: {}\n", columns.join(" | ")));
        }
    }
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/examples/tables.txt");
    if std::env::var_os("TALLOW_BLESS").is_some() {
        std::fs::write(golden, &tables).unwrap();
    }
    let expected = std::fs::read_to_string(golden).unwrap();
    for (printed, expected) in tables.lines().zip(expected.lines()) {
        assert_eq!(printed, expected);
    }
    assert_eq!(tables.lines().count(), expected.lines().count());
}

/// A LaTeX table has at most 8 columns, of which at least one has figures, and a caption with the machine.
#[test]
fn tables_in_latex_have_figures_and_a_caption() {
    for line in commands() {
        let ended = run(example(&format!("{line} --format latex")));
        let mut captions = 0;
        for table in ended.out.split("\\begin{table}").skip(1) {
            let table = table.split("\\end{table}").next().unwrap();
            let caption = table.split("\\caption{").nth(1);
            let caption = caption.and_then(|text| text.lines().next());
            let caption = caption.unwrap_or_else(|| panic!("{line}: no caption in {table}"));
            captions += usize::from(caption.contains("machine: "));
            let alignment = table.split("\\begin{tabular}{").nth(1);
            let alignment = alignment.and_then(|text| text.split('}').next()).unwrap();
            assert!(alignment.len() <= 8, "{line}: {table}");
            let is_known = line.starts_with("custom_model") || line.starts_with("toy_model");
            assert!(
                is_known || alignment.contains('r'),
                "{line}: no figures in {table}"
            );
        }
        assert!(captions > 0, "{line}: {}", ended.out);
    }
    let line = "e2e_benchmark SMALL --mode train-step --steps 2 --format latex";
    let latex = run(example(line)).out;
    let caption = latex
        .lines()
        .find(|line| line.starts_with("\\caption"))
        .unwrap();
    for part in ["B 1", "attention naive", "model custom", "machine: "] {
        assert!(caption.contains(part), "{part} in {caption}");
    }
    for heading in ["Forward (ms)", "Step (ms)", "Backward (ms)", "Peak (MiB)"] {
        assert!(latex.contains(heading), "{heading} in {latex}");
    }
}

/// A table that is wider than the terminal is divided, with the columns that tell rows apart in each part.
#[test]
fn no_column_is_left_out() {
    let line = "e2e_benchmark SMALL --mode all --steps 2 --attention naive flash";
    let out = run(example(line)).out;
    for heading in ["F+B (ms)", "Step (ms)", "B+O (ms)", "Tokens/s", "MFU (%)"] {
        assert!(out.contains(heading), "{heading} in {out}");
    }
    let parts = out.lines().filter(|line| line.starts_with("Attention  "));
    assert!(parts.count() > 1, "{out}");
}

/// With `--isolate` each run has its own process, so its first step has the page faults of a cold start.
#[cfg(unix)]
#[test]
fn isolated_runs_are_each_cold() {
    let line = "e2e_benchmark SMALL --mode train-step --steps 2 --warmup-steps 0 0 0 --format json";
    let cold = |line: &str| {
        let ended = run(example(line));
        assert_eq!((ended.status, ended.err.as_str()), (Some(0), ""), "{line}");
        let report: Value = serde_json::from_str(&ended.out).unwrap();
        let rows = report["rows"].as_array().unwrap().clone();
        assert_eq!(rows.len(), 15, "{line}");
        let last = rows.last().unwrap();
        let [first, later] = ["first_step_page_faults", "later_step_page_faults"]
            .map(|key| last[key].as_f64().unwrap());
        let keys: Vec<String> = last.as_object().unwrap().keys().cloned().collect();
        (first - later, last["first_step_threads"].as_f64(), keys)
    };
    let (together, _, keys) = cold(line);
    let (isolated, threads, isolated_keys) = cold(&format!("{line} --isolate"));
    assert!(
        isolated > 2.0 * together.max(10.0),
        "{isolated} and {together} pages"
    );
    assert!(
        threads.is_none_or(|threads| threads <= 1024.0),
        "{threads:?}"
    );
    assert_eq!(keys, isolated_keys);
}

#[test]
fn details_get_files_of_their_own_as_csv() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rows.csv");
    let line = format!(
        "memory_profile SMALL --mode train-step --format csv --output {}",
        file.display()
    );
    let ended = run(example(&line));
    assert_eq!(ended.status, Some(0));
    for (name, header) in [
        ("rows.csv", "size,batch_size,context_length"),
        ("rows-memory-by-kind-at-each-peak.csv", "run,holds"),
        ("rows-largest-allocations.csv", "run,bytes"),
        ("rows-saved-for-backward.csv", "run,origin"),
    ] {
        let path = folder.path().join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(header), "{name}: {text}");
        let wrote = format!("wrote {}\n", path.display());
        assert!(ended.err.contains(&wrote), "{wrote} in {}", ended.err);
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        assert!(
            reader.records().all(|record| record.is_ok()),
            "{name}: {text}"
        );
    }
}

/// Each phase of a planned step has a time next to eager's. Flags override sizes that the configuration's name omits.
#[test]
fn planned_steps_have_phases() {
    let line =
        "compiled_benchmark --config 1-8-16-1-2 --steps 3 --rounds 2 --vocab-size 100 --d-ff 24";
    let report = report(line);
    let model = report["configuration"]["model 1-8-16-1-2"]
        .as_str()
        .unwrap();
    assert!(model.contains("vocabulary 100"), "{model}");
    let rows = report["rows"].as_array().unwrap();
    for execution in ["eager", "planned"] {
        let mean = |phase: &str, key: &str| {
            let is_own = |row: &&Value| {
                row["mode"] == "train-step"
                    && row["phase"] == phase
                    && row["execution"] == execution
            };
            let row = rows.iter().find(is_own).unwrap();
            assert_eq!(
                (&row["d_ff"], &row["vocab_size"]),
                (&24.into(), &100.into())
            );
            row[key].as_f64().unwrap()
        };
        let [backward, optimizer] = ["backward", "optimizer"].map(|phase| mean(phase, "mean_ms"));
        let update = mean("backward+optimizer", "mean_ms");
        assert!((update / (backward + optimizer) - 1.0).abs() < 1e-9);
        assert!(update < mean("train step", "mean_ms"));
    }
    let mut text = example(line);
    text.env("COLUMNS", "100");
    let text = run(text).out;
    for part in [
        "forward",
        "F+B: forward",
        "F+B: backward",
        "forward+backward",
        "step: forward",
        "step: backward",
        "step: optimizer",
        "step: backward+optimizer",
        "train step",
    ] {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{part} ")) && line.contains('±'));
        let line = line.unwrap_or_else(|| panic!("{part} in {text}"));
        assert_eq!(line.matches('±').count(), 2, "{line}");
    }
}
