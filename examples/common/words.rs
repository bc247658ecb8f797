//! Groups and names of rows, and sentences that refer to them.

use serde::Serialize;
use serde_json::Value;
use tallow::report::{Answer, Column, Fields, Speedup, Verdict, format_mib, list_in_note};

/// Returns a speed-up as a table cell: the ratio of means, `unclear` if its error is too large, null if it is missing.
pub fn speedup_cell(speedup: Option<Speedup>) -> Value {
    match speedup {
        Some(speedup) if speedup.is_clear() => speedup.ratio.into(),
        Some(_) => "unclear".into(),
        None => Value::Null,
    }
}

/// Returns `planned is 1.24x as fast as eager`, or a sentence that the figures do not decide, and what would.
pub fn compared(name: &str, other: &str, speedup: Speedup) -> String {
    match speedup.verdict() {
        Verdict::Faster | Verdict::Slower => format!("{name} is {speedup} as fast as {other}"),
        Verdict::Equal => format!(
            "no difference between {name} and {other} is shown ({speedup} ± {:.2})",
            speedup.error
        ),
        Verdict::Unclear => format!(
            "these figures do not decide whether {name} is faster than {other} ({speedup}): more steps on a quiet \
             machine would"
        ),
    }
}

/// Follows speed-ups of which one is called unclear.
pub const UNCLEAR: &str =
    " Unclear: the spread of these times is too large; more steps on a quiet machine would decide.";

/// Returns the geometric mean; `None` of no ratios.
pub fn geometric_mean(ratios: impl Iterator<Item = f64>) -> Option<f64> {
    let logs: Vec<f64> = ratios.map(f64::ln).collect();
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

/// Returns the geometric mean of speed-ups, `1.24x`; `unclear` if more than half of them are not clear.
pub fn mean_speedup(speedups: &[Speedup]) -> String {
    let clear = || speedups.iter().filter(|speedup| speedup.is_clear());
    let of = speedups.len();
    let unclear = of - clear().count();
    match geometric_mean(clear().map(|speedup| speedup.ratio)) {
        Some(mean) if unclear == 0 => format!("{mean:.2}x"),
        Some(mean) if 2 * unclear <= of => format!("{mean:.2}x ({unclear} of {of} unclear)"),
        _ => "unclear".into(),
    }
}

/// Returns the questions that have an answer, in this order.
pub fn answered<Q: Into<String>>(
    all: impl IntoIterator<Item = (Q, Option<String>)>,
) -> Vec<Answer> {
    let all = all.into_iter();
    all.filter_map(|(question, answer)| Some(Answer::new(question, answer?)))
        .collect()
}

/// Groups items with the same `key`, in the order in which the keys first occur.
pub fn grouped<T, K: PartialEq>(
    items: impl IntoIterator<Item = T>,
    key: impl Fn(&T) -> K,
) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for item in items {
        let own = key(&item);
        match groups.iter_mut().find(|(key, _)| *key == own) {
            Some((_, group)) => group.push(item),
            None => groups.push((own, vec![item])),
        }
    }
    groups
}

/// Returns the columns of the labels of a model's run. Reports leave out those without values.
pub fn label_columns() -> Vec<Column> {
    vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("attention", "Attention"),
        Column::text("checkpointing", "Checkpointing"),
        Column::text("warmup_steps", "Warm-up"),
        Column::text("precision", "Precision"),
        Column::text("execution", "Execution"),
        Column::text("mode", "Mode"),
    ]
}

/// The fields that distinguish rows, each with the prefix of its value in a row's name.
const LABELS: [(&str, &str); 12] = [
    ("configuration", ""),
    ("size", ""),
    ("implementation", ""),
    ("batch_size", "B "),
    ("context_length", "T "),
    ("head_dim", "d "),
    ("d_model", "D "),
    ("attention", ""),
    ("checkpointing", "checkpointing "),
    ("precision", ""),
    ("execution", ""),
    ("warmup_steps", "warm-up "),
];

/// Returns the rows' names: the values in which the rows differ, and the phase.
pub fn names(rows: &[Fields]) -> Vec<String> {
    let differs = |key: &str| {
        let first = rows.first().and_then(|row| row.get(key));
        rows.iter().any(|row| row.get(key) != first)
    };
    // The name of a model's size implies its width.
    let is_sized = rows.iter().any(|row| row.get("size").is_some());
    let labels: Vec<_> = LABELS
        .into_iter()
        .filter(|(key, _)| differs(key) && !(is_sized && *key == "d_model"))
        .collect();
    let has_modes = differs("mode");
    let is_part = |phase: &str| ["forward", "backward", "optimizer"].contains(&phase);
    let name = |row: &Fields| {
        let text = |key: &str| {
            let value = row.get(key).filter(|value| !value.is_null())?;
            Some(value.as_str().map_or(value.to_string(), str::to_string))
        };
        let labels = labels.iter();
        let labels = labels.filter_map(|(key, before)| Some(format!("{before}{}", text(key)?)));
        let mut parts: Vec<String> = labels.collect();
        match (text("phase"), text("mode").filter(|_| has_modes)) {
            (Some(phase), Some(mode)) if is_part(&phase) && phase != mode => {
                parts.push(format!("{phase} of {mode}"));
            }
            (phase, mode) => parts.extend(phase.or(mode)),
        }
        match parts.is_empty() {
            true => "all".into(),
            false => parts.join(" "),
        }
    };
    rows.iter().map(name).collect()
}

/// Returns the rows' names without some of the fields.
pub fn names_without(keys: &[&str], rows: &[Fields]) -> Vec<String> {
    let rows = rows.iter().cloned().map(|mut row| {
        let nulls = keys.iter().map(|key| (*key, Value::Null));
        row.merge(nulls.collect());
        row
    });
    names(&rows.collect::<Vec<_>>())
}

/// Groups rows by the labels and phases in which they differ, which are the groups' names. Labels in `without` do not
/// separate rows.
pub fn named<'r, R: Serialize>(
    rows: impl IntoIterator<Item = &'r R>,
    without: &[&str],
) -> Vec<(String, Vec<&'r R>)> {
    let rows: Vec<&R> = rows.into_iter().collect();
    let fields = rows.iter().map(Fields::of);
    let fields: Vec<Fields> = fields.map(Result::unwrap_or_default).collect(); // structs have fields
    let named = names_without(without, &fields).into_iter().zip(rows);
    let groups = grouped(named, |(name, _)| name.clone()).into_iter();
    groups
        .map(|(name, rows)| (name, rows.into_iter().map(|(_, row)| row).collect()))
        .collect()
}

/// Returns a note on the rows that ran out of memory, with the bytes that each needs.
pub fn out_of_memory(rows: &[Fields]) -> Option<String> {
    let bytes = |row: &Fields, key: &str| row.get(key).and_then(Value::as_u64).map(format_mib);
    let named = rows.iter().zip(names_without(&["phase"], rows));
    let refused = named.filter(|(row, _)| row.get("status") == Some(&"OOM".into()));
    let refused: Vec<_> = refused.collect();
    let available = bytes(refused.first()?.0, "available_bytes");
    let available = available.map_or(String::new(), |bytes| {
        format!(", where {bytes} are available")
    });
    let needed = refused.iter().map(|(row, name)| {
        let needed = bytes(row, "estimate_bytes").unwrap_or("unknown".into());
        format!("{name} {needed}")
    });
    let start = format!("Out of memory{available}, each with what it would take");
    Some(list_in_note(&start, &needed.collect::<Vec<_>>()))
}

/// Returns `12.5% more`, `30.0% less` or `same`.
pub fn change(before: u64, after: u64) -> String {
    let percent = 100.0 * (after as f64 / before as f64 - 1.0);
    match percent {
        _ if percent.abs() < 0.05 => "same".into(),
        more if more > 0.0 => format!("{more:.1}% more"),
        less => format!("{:.1}% less", -less),
    }
}

/// Joins at most `most` of the items: `a; b and 3 more in the table`.
pub fn listed(items: &[String], most: usize) -> String {
    let shown = items[..items.len().min(most)].join("; ");
    match items.len().saturating_sub(most) {
        0 => shown,
        more => format!("{shown} and {more} more in the table"),
    }
}

/// Returns the size of a tensor of the residual stream, for each model by name and its B, T and D.
pub fn residual_stream(element_bytes: usize, tensors: &[(String, [usize; 3])]) -> Answer {
    let sizes = tensors.iter().map(|(name, [b, t, d])| {
        let bytes = *b as f64 * *t as f64 * *d as f64 * element_bytes as f64;
        format!(
            "{name}{b} x {t} x {d} x {element_bytes} = {}",
            format_mib(bytes as u64)
        )
    });
    let sizes = listed(&sizes.collect::<Vec<_>>(), 6);
    let text = format!("B x T x D elements of {element_bytes} bytes: {sizes}.");
    Answer::new("How large is a tensor of the residual stream?", text)
}

/// Two peaks of a configuration, in bytes: its name, the peak of the reference, and the compared peak.
pub type Peaks = (String, u64, u64);

/// Returns how the peak of `name` differs from that of `reference` in each configuration, and the reason. `copies` is
/// the size in bytes of the half-precision copies of weights.
pub fn memory(name: &str, reference: &str, peaks: &[Peaks], copies: Option<u64>) -> String {
    let items = peaks.iter().map(|(title, before, after)| {
        let (peak, of_reference) = (format_mib(*after), format_mib(*before));
        let change = change(*before, *after);
        format!("{title} {change} ({peak}, {reference} {of_reference})")
    });
    let items = listed(&items.collect::<Vec<_>>(), 6);
    let why = copies.map_or(String::new(), |bytes| {
        format!(
            " Autocast leaves weights, gradients and optimizer in f32 and adds a copy of each linear weight, at most {} \
             here; only activations become smaller. --precision {name}-dropping-casts measures the step \
             without them.",
            format_mib(bytes)
        )
    });
    format!("Peak of {name}: {items}.{why}")
}
