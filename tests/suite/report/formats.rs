//! The exact text of one small table in every format.

use tallow::report::{Column, Fields, Format, Report};

use super::{nasty, rendered};

#[test]
fn formats_by_name() {
    for format in Format::ALL {
        assert_eq!(format.to_string().parse::<Format>().unwrap(), format);
        let loud = format.to_string().to_uppercase();
        assert_eq!(loud.parse::<Format>().unwrap(), format);
    }
    assert_eq!(format!("[{:>6}]", Format::Csv), "[   csv]");
    let error = "word".parse::<Format>().unwrap_err().to_string();
    assert!(
        error.contains("text, markdown, csv, json, latex"),
        "{error}"
    );
    assert!(error.contains("\"word\""), "{error}");
}

#[test]
fn text_exactly() {
    let rule = "─".repeat(61);
    let expected = format!(
        r#"Configuration: sizes: tiny, xl

Name & co                                                      Mean (ms)  Peak (MiB)
{rule}  ─────────  ──────────
a|b & c_d_ 5% #1 $x$ {{y}} ~z ^w \ back"q", `t` *s* <u> [v] --n    1234.57         n/a
two lines é                                                          n/a     1,536.0

Answers
Which?
  50% & more.

1. 6N|12

Environment: device: cpu 0; d_head 64%
"#
    );
    assert_eq!(rendered(&nasty(), Format::Text), expected);
}

#[test]
fn markdown_exactly() {
    let name = r#"a\|b \& c_d\_ 5% #1 \$x\$ {y} \~z ^w \\ back"q", \`t\` \*s\* \<u\> \[v\] --n"#;
    let width = name.len();
    let expected = [
        "**Environment**\n".to_string(),
        "- device: cpu<br>0".into(),
        "- d_head: 64%\n".into(),
        "**Configuration**\n".into(),
        "- sizes: tiny, xl\n".into(), // not the seed, which is null
        format!("| {:width$} | Mean (ms) | Peak (MiB) |", "Name \\& co"),
        format!("| {} | --------: | ---------: |", "-".repeat(width)),
        format!("| {name} |   1234.57 |        n/a |"),
        format!("| {:width$} |       n/a |    1,536.0 |", "two<br>lines é"),
        "\n**Answers**\n".into(),
        "- **Which?** 50% \\& more.".into(),
        "\n1. 6N\\|12\n".into(),
    ];
    assert_eq!(rendered(&nasty(), Format::Markdown), expected.join("\n"));
}

#[test]
fn csv_exactly() {
    let expected = r#"name,mean_ms,peak_bytes,samples_ms
"a|b & c_d_ 5% #1 $x$ {y} ~z ^w \ back""q"", `t` *s* <u> [v] --n",1234.5678,,1234.0;1235.1356
"two
lines é",,1610612736,
"#;
    assert_eq!(rendered(&nasty(), Format::Csv), expected);
}

#[test]
fn json_exactly() {
    let expected = r#"{
"title": "",
"environment": {"device":"cpu\n0","d_head":"64%"},
"configuration": {"sizes":["tiny","xl"],"seed":null},
"answers": [{"question":"Which?","answer":"50% & more."}],
"notes": ["6N|12"],
"rows": [
{"name":"a|b & c_d_ 5% #1 $x$ {y} ~z ^w \\ back\"q\", `t` *s* <u> [v] --n","mean_ms":1234.5678,"peak_bytes":null,"samples_ms":[1234.0,1235.1356]},
{"name":"two\nlines é","mean_ms":null,"peak_bytes":1610612736,"samples_ms":null}],
"details": []
}
"#;
    assert_eq!(rendered(&nasty(), Format::Json), expected);
}

/// Columns of equal names move into the caption, of details too, and leave the place to figures.
#[test]
fn latex_says_what_all_rows_share_in_the_caption() {
    let labels = [
        "size",
        "b",
        "attention",
        "precision",
        "mode",
        "execution",
        "checkpoint",
        "device",
    ];
    let row = |ms: f64| {
        let mut row: Fields = labels.iter().map(|label| (*label, "one")).collect();
        row.insert("t", ms as u64).insert("ms", ms);
        row
    };
    let table = |title: &str, labels: &[&str]| Report {
        title: title.into(),
        columns: labels
            .iter()
            .map(|label| Column::text(*label, label.to_uppercase()))
            .chain([Column::text("t", "T"), Column::ms("ms", "Time")])
            .collect(),
        rows: vec![row(1.0), row(2.0)],
        ..Default::default()
    };
    let report = Report {
        environment: Fields::from_iter([("hardware", "a machine")]),
        details: vec![table("By op", &[])],
        ..table("", &labels)
    };
    let latex = rendered(&report, Format::Latex);
    let shared = "SIZE one; B one; ATTENTION one; PRECISION one; MODE one; EXECUTION one; CHECKPOINT one; DEVICE one; \
                  machine: a machine";
    for expected in [
        format!("\\caption{{{shared}}}"),
        format!("\\caption{{By op. {shared}}}"),
        "T & Time (ms)".into(),
    ] {
        assert!(latex.contains(&expected), "{expected} in {latex}");
    }
}

#[test]
fn latex_exactly() {
    let expected = r#"% device: cpu 0
% d_head: 64%
% sizes: tiny, xl
% needs \usepackage{booktabs}
\begin{table}[ht]
\centering
\begin{tabular}{lrr}
\toprule
Name \& co & Mean (ms) & Peak (MiB) \\
\midrule
a\textbar{}b \& c\_d\_ 5\% \#1 \$x\$ \{y\} \textasciitilde{}z \textasciicircum{}w \textbackslash{} back"q", \textasciigrave{}t\textasciigrave{} {*}s{*} \textless{}u\textgreater{} {[}v] -{-}n & 1234.57 & n/a \\
two lines é & n/a & 1,536.0 \\
\bottomrule
\end{tabular}
\end{table}

\paragraph{Which?} 50\% \& more.

\begin{enumerate}
\item 6N\textbar{}12
\end{enumerate}
"#;
    assert_eq!(rendered(&nasty(), Format::Latex), expected);
}
