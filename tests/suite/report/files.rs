//! Saving, and outputs that cannot be written.

use std::fs;
use std::io::{self, Write};

use tallow::Error;
use tallow::report::plot::{LineChart, Series};
use tallow::report::{Format, Report};

use super::{nasty, rendered};

#[test]
fn save_replaces_whole_files_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.csv");
    fs::write(
        &path,
        "old, and much longer than what is to come\n".repeat(100),
    )
    .unwrap();
    nasty().save(Format::Csv, &path).unwrap();
    assert_eq!(
        fs::read_to_string(&path).unwrap(),
        rendered(&nasty(), Format::Csv)
    );
    nasty()
        .save(Format::Json, folder.path().join("new.json"))
        .unwrap();
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["new.json", "report.csv"]);
}

#[cfg(unix)]
#[test]
fn save_keeps_permissions_links_and_devices() {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;

    let ordinary = folder.path().join("ordinary");
    fs::write(&ordinary, "").unwrap();
    let path = folder.path().join("report.txt");
    nasty().save(Format::Text, &path).unwrap();
    assert_eq!(mode(&path), mode(&ordinary), "as readable as any new file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();

    let link = folder.path().join("link.txt");
    symlink(&path, &link).unwrap();
    Report::default().save(Format::Text, &link).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read_to_string(&path).unwrap(), "");
    assert_eq!(mode(&path), 0o600);

    // A pipe, like any device, is written to. (Never a real device here: a mistake would replace it.)
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read_to_string(pipe).unwrap()
    });
    nasty().save(Format::Text, &pipe).unwrap();
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
    assert_eq!(reader.join().unwrap(), rendered(&nasty(), Format::Text));
}

#[test]
fn unwritable_outputs_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let chart = LineChart {
        series: vec![Series::new("a", vec![(0.0, 1.0)])],
        ..Default::default()
    };
    for path in [
        folder.path().join("missing").join("report.csv"),
        file.join("report.csv"),
        folder.path().to_path_buf(),
    ] {
        for error in [
            nasty().save(Format::Csv, &path).unwrap_err(),
            chart.save_svg(&path).unwrap_err(),
        ] {
            assert!(matches!(&error, Error::Io { path: named, .. } if *named == path));
            let text = error.to_string();
            assert!(
                text.starts_with(&format!("{}: cannot write", path.display())),
                "{text}"
            );
        }
    }
}

#[test]
fn a_refusing_writer_is_an_io_error() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    for format in Format::ALL {
        let error = nasty().write_to(format, &mut Full).unwrap_err();
        let Error::Io { source, .. } = &error else {
            panic!("{format}: {error}");
        };
        assert_eq!(source.kind(), io::ErrorKind::StorageFull, "{format}");
    }
}
