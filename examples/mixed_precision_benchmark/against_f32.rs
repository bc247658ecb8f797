//! The memory of half precision compared with that of f32, in words: for this benchmark and `memory_profile`.

use tallow::report::{counted, format_mib};

/// `12.5% more`, `30.0% less` or `same`.
pub fn change(before: u64, after: u64) -> String {
    let percent = 100.0 * (after as f64 / before as f64 - 1.0);
    match percent {
        _ if percent.abs() < 0.05 => "same".into(),
        more if more > 0.0 => format!("{more:.1}% more"),
        less => format!("{:.1}% less", -less),
    }
}

/// In how many configurations `name` uses less memory than f32, the range, and why.
pub fn memory(name: &str, peaks: &[(String, u64, u64)], copies: Option<u64>) -> String {
    let counts = ["less", "more", "same"].map(|word| {
        let own = peaks
            .iter()
            .filter(|(_, b, a)| change(*b, *a).ends_with(word));
        (word, own.count())
    });
    let counts: Vec<String> = counts
        .into_iter()
        .filter(|(_, count)| *count > 0)
        .map(|(word, count)| match word {
            "same" => format!("as much memory as f32 in {count}"),
            word => format!("{word} memory than f32 in {count}"),
        })
        .collect();
    let ratio = |(_, before, after): &(String, u64, u64)| *after as f64 / *before as f64;
    let order = |a: &&(String, u64, u64), b: &&(String, u64, u64)| ratio(a).total_cmp(&ratio(b));
    let words = |(title, before, after): &(String, u64, u64)| {
        let (peak, of_f32) = (format_mib(*after), format_mib(*before));
        format!(
            "{} ({title}: {peak}, f32 {of_f32})",
            change(*before, *after)
        )
    };
    let ends = (peaks.iter().min_by(order), peaks.iter().max_by(order));
    let range = match ends {
        (Some(least), Some(most)) if peaks.len() > 1 => {
            format!(" The range is from {} to {}.", words(least), words(most))
        }
        (Some(only), _) => format!(" The peak is {}.", words(only)),
        _ => String::new(),
    };
    let why = copies.map_or(String::new(), |bytes| {
        format!(
            " Autocast leaves weights, gradients and optimizer in f32 and adds a copy of each linear weight, at most {} \
             here; only activations become smaller. --drop-casts measures the step without the copies.",
            format_mib(bytes)
        )
    });
    let total = counted(peaks.len(), "configuration");
    format!("Of {total}, {name} uses {}.{range}{why}", counts.join(", "))
}
