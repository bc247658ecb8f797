//! Statistics against values computed by hand, and properties of arbitrary samples.

use approx::assert_relative_eq;
use proptest::prelude::*;
use rstest::rstest;
use tallow::Error;
use tallow::report::{Statistics, bytes_to_mib, format_mib, group_digits};

#[test]
fn statistics_by_hand() {
    let s = Statistics::new(&[4.0, 1.0, 2.0, 3.0, 10.0]).unwrap();
    assert_eq!(s.n, 5);
    assert_relative_eq!(s.mean_ms, 4.0);
    // Squared deviations: 0 + 9 + 4 + 1 + 36 = 50, divided by n - 1 = 4.
    assert_relative_eq!(s.std_ms.unwrap(), 12.5f64.sqrt());
    assert_relative_eq!(s.cv_percent.unwrap(), 25.0 * 12.5f64.sqrt());
    assert_eq!((s.min_ms, s.median_ms, s.max_ms), (1.0, 3.0, 10.0));
    assert_eq!(Statistics::new(&[1.0, 2.0]).unwrap().median_ms, 1.5);
}

#[test]
fn what_cannot_be_computed_is_none() {
    let one = Statistics::new(&[7.0]).unwrap();
    assert_eq!((one.std_ms, one.cv_percent), (None, None));
    assert_eq!((one.mean_ms, one.median_ms), (7.0, 7.0));
    let zero_mean = Statistics::new(&[-1.0, 1.0]).unwrap();
    assert!(zero_mean.std_ms.is_some());
    assert_eq!(zero_mean.cv_percent, None);
}

#[rstest]
#[case(&[], "at least one sample")]
#[case(&[1.0, f64::NAN], "NaN at position 1")]
#[case(&[f64::INFINITY], "inf at position 0")]
fn statistics_of_nothing(#[case] samples: &[f64], #[case] text: &str) {
    let error = Statistics::new(samples).unwrap_err();
    assert!(matches!(error, Error::Data { .. }));
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn statistics_serialise_as_their_fields() {
    let s = Statistics::new(&[117.66, 118.55, 117.41]).unwrap();
    let from_serde = serde_json::to_string(&s).unwrap();
    assert_eq!(from_serde, serde_json::to_string(&s.fields()).unwrap());
    assert!(
        from_serde.starts_with(r#"{"n":3,"mean_ms":117.8"#),
        "{from_serde}"
    );
}

proptest! {
    #[test]
    fn statistics_are_ordered_and_ignore_order(
        samples in prop::collection::vec(0.0..1e9f64, 1..60),
        rotation in 0usize..60,
    ) {
        let s = Statistics::new(&samples).unwrap();
        let chain = [s.min_ms, s.median_ms, s.max_ms];
        prop_assert!(chain.is_sorted(), "{chain:?}");
        prop_assert!((s.min_ms..=s.max_ms).contains(&s.mean_ms));
        prop_assert!(s.std_ms.is_none_or(|std| std >= 0.0 && std <= s.max_ms - s.min_ms));

        let mut other = samples.clone();
        other.rotate_left(rotation % samples.len());
        prop_assert_eq!(&Statistics::new(&other).unwrap(), &s);
        other.reverse();
        prop_assert_eq!(Statistics::new(&other).unwrap(), s);
    }

    #[test]
    fn equal_samples_have_no_spread(x in 0.0..1e9f64, n in 2usize..40) {
        let s = Statistics::new(&vec![x; n]).unwrap();
        prop_assert_eq!((s.mean_ms, s.median_ms, s.std_ms), (x, x, Some(0.0)));
    }

    #[test]
    fn grouping_keeps_the_digits(count: u64) {
        let grouped = group_digits(count);
        prop_assert_eq!(grouped.replace(',', ""), count.to_string());
        let (first, rest) = grouped.split_once(',').unwrap_or((&grouped, "000"));
        prop_assert!((1..=3).contains(&first.len()));
        prop_assert!(rest.split(',').all(|group| group.len() == 3));
    }
}

#[test]
fn numbers_in_words() {
    assert_eq!(group_digits(128_625_408), "128,625,408");
    assert_eq!(group_digits(999), "999");
    assert_eq!(bytes_to_mib(3 << 19), 1.5);
    assert_eq!(format_mib(0), "0.0 MiB");
    assert_eq!(format_mib(12_832_823_808), "12,238.3 MiB");
}
