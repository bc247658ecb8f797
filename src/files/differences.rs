//! Differences between saved settings and current ones.

use serde::Serialize;
use serde_json::Value;

/// A setting that differs: its name, and both values as text.
pub(crate) struct Difference {
    pub(crate) field: String,
    pub(crate) saved: String,
    pub(crate) given: String,
}

/// Returns the first field, by name, in which `saved` and `given` differ. Nested fields are named with dots:
/// `schedule.max_lr`. Fields in `free` may differ.
pub(crate) fn first_difference<T: Serialize>(
    saved: &T,
    given: &T,
    free: &[&str],
) -> Option<Difference> {
    let json = |settings| serde_json::to_value(settings).unwrap_or_default();
    compare("", &json(saved), &json(given), free)
}

fn compare(name: &str, saved: &Value, given: &Value, free: &[&str]) -> Option<Difference> {
    if free.contains(&name) {
        return None;
    }
    let (Value::Object(saved_fields), Value::Object(given_fields)) = (saved, given) else {
        return (saved != given).then(|| Difference {
            field: name.into(),
            saved: text(saved),
            given: text(given),
        });
    };
    // A schedule of another kind has other fields; reporting the kind suffices.
    let mut names: Vec<&String> = saved_fields.keys().chain(given_fields.keys()).collect();
    names.sort_by_key(|name| (*name != "kind", *name));
    names.dedup();
    names.into_iter().find_map(|field| {
        let path = match name {
            "" => field.clone(),
            _ => format!("{name}.{field}"),
        };
        let of = |fields: &serde_json::Map<String, Value>| {
            fields.get(field).cloned().unwrap_or(Value::Null)
        };
        compare(&path, &of(saved_fields), &of(given_fields), free)
    })
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::Schedule;
    use std::collections::BTreeMap;

    fn difference<T: Serialize>(saved: &T, given: &T) -> Option<String> {
        first_difference(saved, given, &["schedule.min_lr"])
            .map(|d| format!("{}: {} or {}", d.field, d.saved, d.given))
    }

    #[test]
    fn the_kind_comes_first_nested_fields_have_dots_and_free_ones_may_differ() {
        let cosine = |max_lr, min_lr, total_steps| {
            let schedule = Schedule::WarmupCosine {
                max_lr,
                min_lr,
                warmup_steps: 0,
                total_steps,
            };
            BTreeMap::from([("schedule", schedule)])
        };
        let constant = BTreeMap::from([("schedule", Schedule::Constant { lr: 1.0 })]);
        assert_eq!(
            difference(&constant, &cosine(1.0, 0.0, 10)).unwrap(),
            "schedule.kind: constant or warmup_cosine"
        );
        assert_eq!(
            difference(&cosine(0.5, 0.0, 10), &cosine(0.25, 0.1, 20)).unwrap(),
            "schedule.max_lr: 0.5 or 0.25"
        );
        let free = difference(&cosine(1.0, 0.0, 3), &cosine(1.0, 0.1, 3));
        assert_eq!(free, None);
    }
}
