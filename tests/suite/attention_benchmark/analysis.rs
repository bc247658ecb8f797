//! What is read out of rows that were made up for it.

#[path = "../../../examples/common/analysis/mod.rs"]
#[allow(dead_code)] // the examples' own
mod rows;

use approx::assert_relative_eq;
use rows::{Analysis, figure};
use tallow::report::{Fields, Layout};

/// The rows of a configuration; `ms` and `bytes` are forward's, backward takes twice the time.
fn measured(implementation: &str, length: u64, width: u64, ms: f64, bytes: u64) -> Vec<Fields> {
    let phases = [
        ("forward", 1.0),
        ("backward", 2.0),
        ("forward+backward", 3.0),
    ];
    let rows = phases.map(|(phase, times)| {
        let mut row = refused(implementation, length, width, "ok");
        row.insert("phase", phase);
        row.insert("mean_ms", 1.5 * times * ms);
        row.insert("median_ms", times * ms);
        row.insert("before_backward_bytes", bytes);
        row.insert("peak_bytes", bytes * length);
        row
    });
    rows.into()
}

fn refused(implementation: &str, length: u64, width: u64, status: &str) -> Fields {
    let mut row = Fields::from_iter([("implementation", implementation)]);
    row.insert("context_length", length);
    row.insert("head_dim", width);
    row.insert("phase", "forward+backward");
    row.insert("status", status);
    row
}

/// Naive: time T^2 / 1000, memory T^2 and T^3; flash: half the time, memory T and T^2.
fn grid() -> Vec<Fields> {
    let mut rows = Vec::new();
    for length in [256u64, 1024, 4096] {
        let ms = (length * length) as f64 / 1000.0;
        rows.extend(measured("naive", length, 16, ms, length * length));
        rows.extend(measured("flash", length, 16, ms / 2.0, length));
    }
    for length in [256, 1024] {
        rows.extend(measured("naive", length, 64, length as f64, length));
    }
    rows.push(refused("naive", 4096, 64, "OOM"));
    rows.push(refused("flash", 256, 512, "unsupported"));
    rows.push(Fields::from_iter([("size", "another benchmark's")]));
    rows
}

#[test]
fn configurations_are_counted_by_how_they_ended() {
    let analysis = Analysis::of(&grid(), "head_dim");
    assert_eq!(analysis.configurations, 10);
    let statuses: Vec<_> = analysis.statuses.iter().collect();
    let count = |name: &str| analysis.statuses.get(name).copied();
    assert_eq!(statuses.len(), 3, "{statuses:?}");
    assert_eq!(count("ok"), Some(8));
    assert_eq!((count("OOM"), count("unsupported")), (Some(1), Some(1)));
    let notes = analysis.notes("d");
    assert_eq!(notes[0], "Out of memory: naive 1 of 6, flash 0 of 4.");
    let of = |name: &str| {
        let found = analysis
            .out_of_memory
            .iter()
            .find(|o| o.implementation == name);
        found.map(|o| (o.count, o.of))
    };
    assert_eq!((of("naive"), of("flash")), (Some((1, 6)), Some((0, 4))));
    assert_eq!(Analysis::default().notes("d"), ["Out of memory."]);
}

#[test]
fn what_ran_where_naive_ran_out_of_memory_is_said() {
    let notes = |rows: &[Fields]| Analysis::of(rows, "head_dim").notes("d");
    let mut rows = grid();
    assert!(
        notes(&rows)
            .iter()
            .all(|note| !note.contains("ran out of memory where"))
    );
    rows.extend(measured("flash", 4096, 64, 100.0, 256));
    rows.extend(measured("planned-flash", 4096, 64, 90.0, 128));
    assert_eq!(
        notes(&rows)[1..3],
        [
            "Naive ran out of memory where flash ran (F+B, peak): T 4096 d 64 (450 ms, 1.0 MiB).",
            "Naive ran out of memory where planned-flash ran (F+B, peak): T 4096 d 64 (405 ms, 0.5 MiB).",
        ]
    );
}

#[test]
fn growth_is_fitted_where_three_lengths_were_measured() {
    let analysis = Analysis::of(&grid(), "head_dim");
    let growth = &analysis.growth;
    let of: Vec<_> = growth
        .iter()
        .map(|g| (g.implementation.as_str(), g.width, g.shortest, g.longest))
        .collect();
    assert_eq!(of, [("naive", 16, 256, 4096), ("flash", 16, 256, 4096)]);
    for (growth, exponents) in growth.iter().zip([[2.0, 2.0, 3.0], [2.0, 1.0, 2.0]]) {
        let laws = [growth.time, growth.before_backward, growth.peak];
        for (law, exponent) in laws.into_iter().zip(exponents) {
            let law = law.unwrap();
            assert_relative_eq!(law.exponent, exponent, epsilon = 1e-9);
            assert_eq!(law.points, 3);
        }
    }
    assert_relative_eq!(
        growth[0].time.unwrap().coefficient,
        3.0 / 1000.0,
        epsilon = 1e-9
    );
    let table = &analysis.tables("d")[1];
    let text = table.to_text(&Layout::default());
    let expected = "flash           2.00                    1.00  2.00";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("Configuration: d 16"), "{text}");
}

#[test]
fn memory_that_was_not_measured_has_no_exponent_and_no_peak() {
    let rows: Vec<Fields> = grid()
        .into_iter()
        .map(|mut row| {
            row.insert("peak_bytes", None::<u64>);
            row.insert("before_backward_bytes", None::<u64>);
            row
        })
        .collect();
    let analysis = Analysis::of(&rows, "head_dim");
    assert!(analysis.peaks.is_empty());
    assert_eq!(analysis.growth.len(), 2);
    assert!(
        analysis
            .growth
            .iter()
            .all(|g| g.peak.is_none() && g.time.is_some())
    );
    let growth = &analysis.tables("d")[1].rows[0];
    assert_eq!(growth.get("points"), Some(&3.into()));
    assert!(growth.get("peak_exponent").unwrap().is_null());
    assert!(growth.get("time_exponent").unwrap().is_number());
    assert_eq!(figure(&rows, "head_dim", "d").charts.len(), 1);
}

#[test]
fn extremes_and_peaks_are_each_implementations_own() {
    let analysis = Analysis::of(&grid(), "head_dim");
    let phases: Vec<_> = analysis
        .extremes
        .iter()
        .map(|e| (e.implementation.as_str(), e.phase.as_str()))
        .collect();
    assert_eq!(
        phases,
        [
            ("naive", "forward"),
            ("naive", "backward"),
            ("naive", "forward+backward"),
            ("flash", "forward"),
            ("flash", "backward"),
            ("flash", "forward+backward")
        ]
    );
    let naive = &analysis.extremes[0];
    let place = |p: &rows::Place| (p.context_length, p.width);
    assert_eq!(place(&naive.fastest), (256, 16));
    assert_relative_eq!(naive.fastest.mean_ms, 1.5 * 65.536);
    assert_eq!(place(&naive.slowest), (4096, 16));
    let peaks: Vec<_> = analysis
        .peaks
        .iter()
        .map(|p| (p.implementation.as_str(), p.context_length, p.peak_bytes))
        .collect();
    assert_eq!(
        peaks,
        [
            ("naive", 4096, 4096 * 4096 * 4096),
            ("flash", 4096, 4096 * 4096)
        ]
    );
}

#[test]
fn speedups_are_naive_over_others_where_both_ran() {
    let analysis = Analysis::of(&grid(), "head_dim");
    let lengths: Vec<_> = analysis.speedups.iter().map(|s| s.context_length).collect();
    assert_eq!(lengths, [256, 1024, 4096]);
    assert!(
        analysis
            .speedups
            .iter()
            .all(|s| s.implementation == "flash")
    );
    for speedup in &analysis.speedups {
        for ratio in [speedup.forward, speedup.backward, speedup.forward_backward] {
            assert_relative_eq!(ratio.unwrap(), 2.0);
        }
        assert_relative_eq!(speedup.peak.unwrap(), speedup.context_length as f64);
    }
    let notes = analysis.notes("d").join("\n");
    let expected = "naive takes 2.00x as long as flash forward, 2.00x backward, 2.00x together";
    assert!(notes.contains(expected), "{notes}");

    for sentence in [
        "flash beside naive: at T 256 faster (2.00x) with 100% less memory, at T 4096 faster (2.00x) with 100% less memory.",
        "So flash holds 100% less before backward at T 4096, d 16; what naive holds grows as T^2.00, what flash holds as \
         T^1.00.",
    ] {
        assert!(notes.contains(sentence), "{sentence} in {notes}");
    }

    // A third implementation has means of its own.
    let mut rows = grid();
    rows.extend(measured("planned", 1024, 64, 256.0, 1024));
    let analysis = Analysis::of(&rows, "head_dim");
    assert_eq!(analysis.speedups.len(), 4);
    let notes = analysis.notes("d").join("\n");
    assert!(notes.contains(expected), "{notes}");
    let planned = "naive takes 4.00x as long as planned forward, 4.00x backward, 4.00x together (medians; geometric \
        mean of 1 configuration).";
    assert!(notes.contains(planned), "{notes}");
}

/// Slower and larger when short, faster and leaner when long: as the rows say, not as is expected.
#[test]
fn sentences_by_length_are_the_rows_own() {
    let mut rows = Vec::new();
    for (length, ms, bytes) in [(64, 125.0, 110), (512, 80.0, 80), (4096, 100.0, 75)] {
        rows.extend(measured("naive", length, 64, 100.0, 100));
        rows.extend(measured("planned", length, 64, ms, bytes));
        rows.extend(measured("flash", length, 64, 100.0, 120));
    }
    let analysis = Analysis::of(&rows, "head_dim");
    let expected = [
        "planned beside naive: at T 64 slower (0.80x) with 10% more memory, at T 4096 as fast (1.00x) with 25% less memory.",
        "flash beside naive: at T 64 as fast (1.00x) with 20% more memory, at T 4096 as fast (1.00x) with 20% more memory.",
    ];
    assert_eq!(analysis.by_length(), expected);
    let notes = analysis.notes("d").join("\n");
    assert!(!notes.contains("What would avoid"), "{notes}");
    rows.retain(|row| row.get("context_length") == Some(&64.into()));
    assert!(Analysis::of(&rows, "head_dim").by_length().is_empty());
}

#[test]
fn a_module_is_read_by_its_own_width() {
    let mut rows = measured("naive", 16, 256, 1.0, 1);
    for row in &mut rows {
        row.insert("d_model", 256);
    }
    assert_eq!(Analysis::of(&rows, "d_model").configurations, 1);
    assert_eq!(Analysis::of(&rows, "width").configurations, 0);
}

#[test]
fn the_figure_has_a_line_for_each_implementation_and_width() {
    let figure = figure(&grid(), "head_dim", "d");
    assert_eq!(figure.charts.len(), 2);
    for chart in &figure.charts {
        assert!(chart.log_x && chart.log_y);
        let names: Vec<_> = chart.series.iter().map(|s| s.name.as_str()).collect();
        let expected = [
            "naive, d 16",
            "naive, d 64",
            "naive, d 512",
            "flash, d 16",
            "flash, d 64",
            "flash, d 512",
        ];
        assert_eq!(names, expected);
        assert_eq!(chart.colours, Some(3));
        assert_eq!(chart.series[1].points.len(), 2);
    }
    let memory = &figure.charts[1].series[0].points;
    assert_relative_eq!(memory[2].1, 4096f64.powi(3) / 1048576.0);
    assert!(figure.to_svg().unwrap().contains("naive, d 512 (no data)"));
}
