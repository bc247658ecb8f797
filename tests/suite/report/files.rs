//! Saved reports, and outputs that cannot be written.

use std::fs;
use std::io::{self, Write};

use tallow::Error;
use tallow::report::plot::{self, Chart, Series};
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

    // A pipe is written to, like any device. (The test never uses a real device, which a mistake would replace.)
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
    let chart = Chart {
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
            plot::save(std::slice::from_ref(&chart), &path).unwrap_err(),
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

#[cfg(feature = "png")]
#[test]
fn a_picture_called_png_is_one_with_its_text_in_it() {
    use resvg::tiny_skia::{Color, Pixmap};
    let folder = tempfile::tempdir().unwrap();
    let draw = |title: &str, name: &str| {
        let chart = [Chart {
            title: title.into(),
            series: vec![Series::new("a", vec![(0.0, 1.0), (1.0, 2.0)])],
            ..Default::default()
        }];
        let path = folder.path().join(name);
        plot::save(&chart, &path).unwrap();
        (plot::to_svg(&chart).unwrap(), fs::read(path).unwrap())
    };
    let (svg, bytes) = draw("", "step.svg");
    assert_eq!(bytes, svg.as_bytes());

    let [untitled, titled] = [draw("", "a.PNG"), draw("Loss", "b.png")]
        .map(|(_, bytes)| Pixmap::decode_png(&bytes).unwrap());
    // 860 by 544 in the document, at two pixels per unit.
    assert_eq!((titled.width(), titled.height()), (1720, 1088));
    let dark = |picture: &Pixmap, rows: std::ops::Range<usize>| {
        let row = picture.width() as usize;
        picture.pixels()[rows.start * row..rows.end * row]
            .iter()
            .filter(|pixel| pixel.demultiply() != Color::WHITE.to_color_u8())
            .count()
    };
    let title = 0..88;
    assert_eq!(dark(&untitled, title.clone()), 0, "white, not transparent");
    assert!(dark(&titled, title) > 100, "letters were drawn");
    assert!(dark(&untitled, 200..800) > 1000, "lines were drawn");
    assert_eq!(draw("Loss", "c.png").1, draw("Loss", "d.png").1);
}
