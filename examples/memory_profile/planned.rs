//! Steps planned beforehand: their arena beside what was counted.

use super::{Run, labels};
use candle_core::Device;
use tallow::Result;
use tallow::compile::{Category, Plan};
use tallow::report::{Fields, counted, format_mib, list_in_note};

/// The plan's bytes beside the counted peak; `OOM` where it does not fit.
pub fn row(run: &Run, device: &Device) -> Result<Fields> {
    let measured = run.end_to_end.run(device, |_, _| ())?;
    let mut row = labels(run);
    let keys = [
        "status",
        "estimate_bytes",
        "available_bytes",
        "peak_bytes",
        "reserved_peak_bytes",
    ];
    for key in keys {
        let value = measured.first().and_then(|measured| measured.get(key));
        row.insert(key, value.cloned());
    }
    let bytes = |key: &str| row.get(key).and_then(serde_json::Value::as_f64);
    if let (Some(predicted), Some(peak)) = (bytes("estimate_bytes"), bytes("peak_bytes")) {
        row.insert("estimate_error_percent", 100.0 * (predicted / peak - 1.0));
    }
    Ok(row)
}

/// What the plan's buffers are there for.
pub fn note(title: &str, plan: &Plan) -> String {
    let held = Category::ALL.into_iter().filter_map(|category| {
        let bytes = plan.category_bytes(category);
        (bytes > 0).then(|| format!("{} {}", category.name(), format_mib(bytes)))
    });
    let beside = match plan.workspace_bytes() {
        0 => String::new(),
        bytes => format!(" and a workspace of {}", format_mib(bytes)),
    };
    let start = format!(
        "{title}: {} over an arena of {}{beside}; the most of each kind",
        counted(plan.calls().len(), "call"),
        format_mib(plan.peak_bytes()),
    );
    list_in_note(&start, &held.collect::<Vec<_>>())
}
