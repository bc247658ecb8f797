//! Slices of a token sequence.

use super::*;
use rstest::rstest;

#[rstest]
#[case(1_115_394, 0.1, 1_003_854)] // tinyshakespeare, as nanoGPT cuts it: int(n * 0.9)
#[case(10, 0.25, 7)]
#[case(2, 0.5, 1)]
fn split_takes_validation_from_the_end(
    #[case] len: usize,
    #[case] fraction: f64,
    #[case] train_len: usize,
) {
    let (train, validation) = counting(len).split(fraction).unwrap();
    assert_eq!(
        (train.len(), validation.len()),
        (train_len, len - train_len)
    );
    assert_eq!(
        train.to_vec().unwrap().last(),
        Some(&(train_len as u32 - 1))
    );
    assert_eq!(validation.to_vec().unwrap()[0], train_len as u32);
    assert_eq!(
        validation.to_string(),
        format!("ids in memory (tokens {train_len}..{len})")
    );
}

#[test]
fn splits_and_ranges_that_leave_nothing() {
    let tokens = counting(10);
    for fraction in [0.0, 1.0, -0.1, 1.5, f64::NAN, f64::INFINITY] {
        let value = format!("got {fraction}");
        refusal(tokens.split(fraction), &["validation_fraction", &value]);
    }
    refusal(
        tokens.split(1e-20),
        &["ids in memory", "10 to train and 0 to validate"],
    );
    refusal(
        tokens.split(0.95),
        &["0 to train and 10 to validate", "0.95"],
    );
    refusal(tokens.slice(3..3), &["3..3", "0..10"]);
    refusal(tokens.slice(8..11), &["8..11", "0..10"]);
    let view = tokens.slice(2..8).unwrap().slice(1..4).unwrap();
    assert_eq!(view.to_vec().unwrap(), [3, 4, 5]);
    let mut two = [0; 2];
    view.copy_to(1, &mut two).unwrap();
    assert_eq!(two, [4, 5]);
    refusal(
        view.copy_to(2, &mut two),
        &["tokens 3..6", "2 tokens from 2", "0..3"],
    );
    refusal(view.copy_to(usize::MAX, &mut two), &["0..3"]);
}
