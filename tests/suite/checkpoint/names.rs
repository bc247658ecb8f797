//! Strategies by name, and the number of blocks that they recompute.

use crate::check::refusal;
use tallow::nn::Checkpointing;

#[test]
fn names_go_both_ways() {
    for name in ["none", "block", "every-1", "every-12", "sqrt"] {
        let strategy: Checkpointing = name.parse().unwrap();
        assert_eq!(strategy.to_string(), name);
        let json = serde_json::to_string(&strategy).unwrap();
        assert_eq!(json, format!("\"{name}\""));
        assert_eq!(
            serde_json::from_str::<Checkpointing>(&json).unwrap(),
            strategy
        );
    }
    for name in [
        "", "None", "every", "every-", "every-0", "every--1", "every-x", "sqrt ",
    ] {
        refusal(
            name.parse::<Checkpointing>(),
            &["every-N", &format!("{name:?}")],
        );
    }
}

#[test]
fn how_many_blocks_are_run_again() {
    for (name, layers, wanted) in [
        ("none", 12, 0),
        ("block", 1, 0),
        ("block", 12, 11),
        ("every-5", 12, 10),
        ("every-6", 12, 6),
        ("every-12", 12, 0),
        ("every-100", 12, 0),
        ("sqrt", 0, 0),
        ("sqrt", 1, 0),
        ("sqrt", 2, 0), // one segment of two
        ("sqrt", 3, 2),
        ("sqrt", 9, 6),
        ("sqrt", 10, 8),
        ("sqrt", 48, 42),
    ] {
        let strategy: Checkpointing = name.parse().unwrap();
        assert_eq!(
            strategy.recomputed_blocks(layers),
            wanted,
            "{name} of {layers}"
        );
    }
}
