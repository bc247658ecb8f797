//! Devices selected by name.

use super::*;
use rstest::rstest;
use tallow::hardware;

#[rstest]
#[case("cpu")]
#[case("cpu:0")]
fn the_cpu(#[case] name: &str) {
    let cpu = tallow::device(name).unwrap();
    assert!(cpu.is_cpu());
    assert_eq!(hardware::device_name(&cpu), "cpu");
    TransformerLM::new(&mini(), 0, &cpu).unwrap();
}

#[rstest]
#[case::kind("tpu", &["no such kind of device", "cpu, cuda:N or metal:N"])]
#[case::kind_with_ordinal("tpu:0", &["no such kind of device"])]
#[case::empty("", &["no such kind of device"])]
#[case::no_kind(":0", &["no such kind of device"])]
#[case::case("CUDA", &["no such kind of device"])]
#[case::space(" cpu", &["no such kind of device"])]
#[case::second_cpu("cpu:1", &["one CPU device", "write cpu"])]
#[case::no_ordinal("cuda:x", &["part after the colon is not a number", "cuda:0"])]
#[case::empty_ordinal("cpu:", &["part after the colon is not a number"])]
#[case::negative("cuda:-1", &["part after the colon is not a number"])]
#[case::two_ordinals("cuda:0:1", &["part after the colon is not a number"])]
#[case::large("cuda:99999999999999999999", &["part after the colon is not a number"])]
fn names_of_nothing(#[case] name: &str, #[case] parts: &[&str]) {
    let given = format!("device {name:?}: ");
    let error = refusal(tallow::device(name), &[&[given.as_str()], parts].concat());
    assert!(matches!(error, Error::Device { .. }), "{error:?}");
}

#[cfg(not(feature = "cuda"))]
#[rstest]
fn cuda_needs_its_feature(#[values("cuda", "cuda:0", "cuda:3")] name: &str) {
    let given = format!("device {name:?}: ");
    refusal(
        tallow::device(name),
        &[&given, "no support", "build with --features cuda"],
    );
}

#[cfg(not(feature = "metal"))]
#[rstest]
fn metal_needs_its_feature(#[values("metal", "metal:0")] name: &str) {
    let given = format!("device {name:?}: ");
    refusal(
        tallow::device(name),
        &[&given, "no support", "build with --features metal"],
    );
}

#[test]
fn a_description_counts_the_threads() {
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let text = pool.unwrap().install(|| hardware::description(&CPU));
        let (model, count) = text.rsplit_once(", ").unwrap();
        assert_eq!(count, format!("{threads} threads"));
        assert!(!model.trim().is_empty(), "{text}");
    }
}
