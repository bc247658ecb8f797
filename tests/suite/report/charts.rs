//! Line charts, checked by their SVG.

use proptest::prelude::*;
use rstest::rstest;
use tallow::Error;
use tallow::report::plot::{Chart, Series, TimeSpan, to_svg};

fn svg(chart: Chart) -> tallow::Result<String> {
    to_svg(&[chart])
}

fn svg_texts(svg: &str) -> Vec<&str> {
    svg.split("<text")
        .skip(1)
        .map(|part| part[part.find('>').unwrap() + 1..part.find("</text>").unwrap()].trim())
        .collect()
}

fn count(svg: &str, what: &str) -> usize {
    svg.matches(what).count()
}

#[test]
fn a_chart_has_text_colours_and_the_points_that_are_finite() {
    let nan = f64::NAN;
    let chart = Chart {
        title: "Forward <&>".into(),
        x_label: "sequence length".into(),
        y_label: "time (ms)".into(),
        log_x: true,
        log_y: true,
        series: vec![
            Series::new("naive", vec![(256.0, 1.0), (1024.0, nan), (4096.0, 100.0)]),
            Series::new(
                "flash",
                vec![(256.0, 0.5), (1024.0, f64::INFINITY), (nan, 1.0)],
            ),
            Series::new("absent", vec![(nan, nan)]),
        ],
        ..Default::default()
    };
    let svg = svg(chart).unwrap();
    let texts = svg_texts(&svg);
    for text in [
        "Forward &lt;&amp;&gt;",
        "sequence length",
        "time (ms)",
        "naive",
        "flash",
        "absent (no data)",
        "256",
        "4,096",
        "1",
        "100",
    ] {
        assert!(texts.contains(&text), "{text:?} in {texts:?}");
    }
    assert!(!texts.contains(&"1,024"), "no tick where no point is");
    // Two points and one, and a marker in the legend for each of the two lines.
    assert_eq!(count(&svg, "<circle"), 5);
    assert!(svg.contains("#0072B2") && svg.contains("#D55E00"));
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
    assert!(svg.trim_end().ends_with("</svg>"));
}

#[test]
fn points_stand_where_their_values_say() {
    let chart = |log_y| Chart {
        log_y,
        series: vec![Series::new("", vec![(0.0, 1.0), (1.0, 10.0), (2.0, 100.0)])],
        ..Default::default()
    };
    let heights = |svg: &str| -> Vec<f64> {
        svg.split("cy=\"")
            .skip(1)
            .map(|part| part[..part.find('"').unwrap()].parse().unwrap())
            .collect()
    };
    let log = heights(&svg(chart(true)).unwrap());
    assert_eq!(log.len(), 3);
    assert!(log[0] > log[2], "up is more");
    assert!((log[0] - 2.0 * log[1] + log[2]).abs() <= 2.0, "{log:?}");
    let linear = heights(&svg(chart(false)).unwrap());
    let share = (linear[0] - linear[1]) / (linear[0] - linear[2]);
    assert!((share - 9.0 / 99.0).abs() < 0.01, "{linear:?}");
}

/// No power of ten, nor 2 or 5 times one, is between 1003.5 and 1009.5.
#[test]
fn a_narrow_logarithmic_axis_has_the_ticks_of_a_linear_one() {
    let svg = svg(Chart {
        log_y: true,
        series: vec![Series::new("", vec![(1.0, 1003.5), (2.0, 1009.5)])],
        ..Default::default()
    });
    let svg = svg.unwrap();
    let texts = svg_texts(&svg);
    for tick in ["1,004", "1,006", "1,008"] {
        assert!(texts.contains(&tick), "{tick} in {texts:?}");
    }
}

#[test]
fn many_lines_stay_distinguishable_and_long_lines_have_no_markers() {
    let series = |k: usize| Series::new(format!("line {k}"), vec![(0.0, k as f64), (1.0, 2.0)]);
    let chart = Chart {
        series: (0..8).map(series).collect(),
        ..Default::default()
    };
    let eight = svg(chart).unwrap();
    let colours: std::collections::BTreeSet<_> = eight
        .split("<circle")
        .skip(1)
        .map(|part| &part[part.find("fill=\"").unwrap() + 6..][..7])
        .collect();
    assert_eq!(
        colours.len(),
        7,
        "the eighth line is dashed in the first colour"
    );
    // In the plot and in the legend.
    assert_eq!(count(&eight, "stroke-dasharray"), 2);
    assert_eq!(count(&eight, "stroke=\"#0072B2\""), 4);

    let long = Chart {
        series: vec![Series::new(
            "loss",
            (0..500).map(|i| (i.into(), 1.0)).collect(),
        )],
        ..Default::default()
    };
    assert_eq!(count(&svg(long).unwrap(), "<circle"), 0);
}

#[test]
fn colours_begin_again_where_the_chart_says() {
    let series = |k: usize| Series::new(format!("line {k}"), vec![(0.0, k as f64), (1.0, 2.0)]);
    let svg = |colours| {
        let chart = Chart {
            series: (0..4).map(series).collect(),
            colours,
            ..Default::default()
        };
        svg(chart).unwrap()
    };
    let [blue, orange, green] = ["#0072B2", "#D55E00", "#009E73"];
    let two = svg(Some(2));
    assert!(two.contains(blue) && two.contains(orange) && !two.contains(green));
    let dashed = |svg: &str| count(svg, "stroke-dasharray");
    assert_eq!([dashed(&two), dashed(&svg(None))], [4, 0]);
    // 0, and more than there are, are replaced by the nearest valid number.
    assert!(!svg(Some(0)).contains(orange));
    assert_eq!(svg(Some(99)), svg(None));
}

#[test]
fn a_figure_has_its_charts_below_each_other() {
    let chart = |title: &str, name: &str| Chart {
        title: title.into(),
        series: vec![Series::new(name, vec![(0.0, 1.0), (1.0, 2.0)])],
        ..Default::default()
    };
    let (first, second) = (chart("Time", ""), chart("Memory", "naive"));
    let svg = to_svg(&[first.clone(), second.clone()]).unwrap();
    assert_eq!(count(&svg, "<svg"), 1);
    let texts = svg_texts(&svg);
    assert!(
        texts.contains(&"Time") && texts.contains(&"Memory"),
        "{texts:?}"
    );
    let height = |svg: &str| -> u32 {
        let part = &svg[svg.find("height=\"").unwrap() + 8..];
        part[..part.find('"').unwrap()].parse().unwrap()
    };
    let alone =
        [&first, &second].map(|chart| height(&to_svg(std::slice::from_ref(chart)).unwrap()));
    assert_eq!(height(&svg), alone[0] + alone[1]);
    // Two points of each chart and one marker in the only legend; the second chart's points are below the first chart.
    let heights: Vec<u32> = svg
        .split("cy=\"")
        .skip(1)
        .map(|part| part[..part.find('"').unwrap()].parse().unwrap())
        .collect();
    assert_eq!(heights.len(), 5);
    assert_eq!(heights.iter().filter(|y| **y < alone[0]).count(), 2);

    assert!(to_svg(&[]).is_err());
    let empty = to_svg(&[first, Chart::default()]);
    let error = empty.unwrap_err().to_string();
    assert!(error.contains("no finite point"), "{error}");
}

#[rstest]
#[case(vec![])]
#[case(vec![Series::new("a", vec![])])]
#[case(vec![Series::new("a", vec![(f64::NAN, 1.0), (1.0, f64::INFINITY)])])]
fn an_empty_chart_is_an_error(#[case] series: Vec<Series>) {
    let chart = Chart {
        title: "T".into(),
        series,
        ..Default::default()
    };
    let error = svg(chart.clone()).unwrap_err();
    assert!(matches!(error, Error::Plot(_)));
    assert!(error.to_string().contains("no finite point"), "{error}");
}

#[rstest]
#[case(0.0, true, false, "x = 0")]
#[case(-2.5, false, true, "y = -2.5")]
fn logarithms_of_nothing_are_errors(
    #[case] value: f64,
    #[case] log_x: bool,
    #[case] log_y: bool,
    #[case] text: &str,
) {
    let chart = Chart {
        log_x,
        log_y,
        series: vec![Series::new("s", vec![(1.0, 1.0), (value, value)])],
        ..Default::default()
    };
    let error = svg(chart.clone()).unwrap_err();
    assert!(matches!(error, Error::Plot(_)));
    assert!(error.to_string().contains(text), "{error}");
    let linear = Chart {
        log_x: false,
        log_y: false,
        ..chart
    };
    svg(linear).unwrap();
}

proptest! {
    #[test]
    fn any_finite_chart_can_be_drawn(
        points in prop::collection::vec((-1e12..1e12f64, -1e-3..1e-3f64), 1..20),
        scale in -12i32..12,
        log: bool,
    ) {
        let points = points
            .into_iter()
            .map(|(x, y)| (x, y * 10f64.powi(scale)))
            .map(|(x, y)| if log { (x.abs() + 1e-9, y.abs() + 1e-30) } else { (x, y) })
            .collect();
        let chart = Chart {
            log_x: log,
            log_y: log,
            series: vec![Series::new("s", points)],
            ..Default::default()
        };
        let svg = svg(chart).unwrap();
        // At least two ticks on each axis, in addition to the legend's one text.
        let texts = svg_texts(&svg);
        prop_assert!((5..40).contains(&texts.len()), "{:?}", texts);
        prop_assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}

/// The name of a span too narrow for it is placed above the other names, with a line down to the span.
#[test]
fn every_span_is_named() {
    let span = |name: &str, from: f64, to: f64| TimeSpan {
        name: name.into(),
        from,
        to,
    };
    let height = |spans: Vec<TimeSpan>| {
        let names: Vec<String> = spans.iter().map(|span| span.name.clone()).collect();
        let chart = Chart {
            stacked: true,
            series: vec![Series::new("weights", vec![(0.0, 1.0), (100.0, 1.0)])],
            spans,
            ..Default::default()
        };
        let svg = svg(chart).unwrap();
        let texts = svg_texts(&svg);
        for name in names {
            assert!(texts.contains(&name.as_str()), "{name} in {texts:?}");
        }
        let height = svg.split("height=\"").nth(1).unwrap();
        height.split('"').next().unwrap().parse::<u32>().unwrap()
    };
    let wide = height(vec![
        span("forward", 0.0, 40.0),
        span("backward", 40.0, 100.0),
    ]);
    let narrow = |from: f64, to: f64| {
        height(vec![
            span("forward", 0.0, from),
            span("backward", from, to),
            span("optimizer", to, 100.0),
        ])
    };
    assert_eq!(narrow(40.0, 98.0), wide + 24);
    assert_eq!(narrow(96.0, 98.0), wide + 48);
}

#[test]
fn a_caption_is_below_stacked_areas() {
    let chart = Chart {
        stacked: true,
        series: vec![Series::new("weights", vec![(0.0, 1.0), (1.0, 1.0)])],
        caption: vec!["tiny B4 T256".into(), "cpu".into()],
        ..Default::default()
    };
    let svg = svg(chart).unwrap();
    let texts = svg_texts(&svg);
    assert_eq!(texts[texts.len() - 2..], ["tiny B4 T256", "cpu"]);
}

/// One name has one colour in charts of different layers, and the peak is marked.
#[test]
fn layers_keep_their_colours_and_the_peak_is_marked() {
    let chart = |layers: &[(&str, usize)]| {
        let layers = layers.iter().map(|(name, colour)| Series {
            colour: Some(*colour),
            ..Series::new(*name, vec![(0.0, 1.0), (1.0, 41.5), (2.0, 2.0)])
        });
        let chart = Chart {
            stacked: true,
            series: layers.collect(),
            ..Default::default()
        };
        svg(chart).unwrap()
    };
    let both = chart(&[("weights", 3), ("activations", 1)]);
    let alone = chart(&[("activations", 1)]);
    for svg in [&both, &alone] {
        assert!(svg.contains("#0072B2"), "{svg}");
    }
    assert!(both.contains("#009E73") && !alone.contains("#009E73"));
    let is_marked = |svg: &str, peak: &str| svg_texts(svg).iter().any(|text| text.contains(peak));
    assert!(is_marked(&both, "peak 83.0") && is_marked(&alone, "peak 41.5"));
}

#[test]
fn areas_that_cannot_be_stacked_are_refused() {
    let chart = |points: &[(f64, f64)]| Chart {
        title: "memory".into(),
        stacked: true,
        series: vec![Series::new("weights", points.to_vec())],
        spans: vec![TimeSpan {
            name: "forward".into(),
            from: -1.0, // extends beyond the axis
            to: 9.0,
        }],
        ..Default::default()
    };
    let drawn = svg(chart(&[(0.0, 0.0), (1.0, 0.0), (2.0, 0.0)])).unwrap();
    assert!(drawn.contains("weights") && drawn.contains("forward"));
    let refused = |chart: Chart| {
        let error = svg(chart).unwrap_err().to_string();
        assert!(error.contains("areas need"), "{error}");
    };
    for points in [
        &[(0.0, 1.0)][..],
        &[],
        &[(1.0, 1.0), (0.0, 1.0)],
        &[(0.0, 1.0), (1.0, -2.0)],
        &[(0.0, 1.0), (1.0, f64::NAN)],
    ] {
        refused(chart(points));
    }
    let two = [(0.0, 1.0), (1.0, 1.0)];
    let mut unequal = chart(&two);
    unequal
        .series
        .push(Series::new("gradients", vec![(0.0, 1.0)]));
    refused(unequal);
    let logarithmic = Chart {
        log_y: true,
        ..chart(&two)
    };
    refused(logarithmic);
}
