//! Saving pictures: an SVG document as it is, or rendered to PNG if the file's extension is `.png`.

use crate::{Error, Result, files};
use std::path::Path;

/// Writes the picture `svg` to a file: as PNG if the path ends in `.png`, else as SVG.
///
/// # Errors
/// [`Error::Io`] with the path if it cannot be written; [`Error::Plot`] for PNG in a build without the feature `png`.
pub(crate) fn save(svg: &str, path: &Path) -> Result<()> {
    let wants_png = path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("png"));
    if wants_png {
        files::write_bytes(path, &png(svg)?)
    } else {
        files::write_bytes(path, svg.as_bytes())
    }
}

/// Renders the document as PNG at two pixels for each of its units, so that small text is readable on any screen. Text
/// is set in DejaVu Sans Condensed, which is compiled in: the picture does not depend on the fonts of the machine.
#[cfg(feature = "png")]
pub(crate) fn png(svg: &str) -> Result<Vec<u8>> {
    use resvg::{tiny_skia, usvg};

    const SCALE: f32 = 2.0;
    let refused = |problem: String| Error::Plot(format!("the picture as PNG: {problem}"));

    let mut options = usvg::Options::default();
    let fonts = options.fontdb_mut();
    fonts.load_font_data(dejavu::sans_condensed::regular().to_vec());
    fonts.set_sans_serif_family("DejaVu Sans");
    let tree = usvg::Tree::from_str(svg, &options).map_err(|e| refused(e.to_string()))?;
    let (width, height) = (tree.size().width() * SCALE, tree.size().height() * SCALE);
    let pixels = tiny_skia::Pixmap::new(width.ceil() as u32, height.ceil() as u32);
    let too_large = || format!("{width} x {height} pixels cannot be drawn; save it as .svg");
    let mut pixels = pixels.ok_or_else(|| refused(too_large()))?;
    pixels.fill(tiny_skia::Color::WHITE);
    let scale = tiny_skia::Transform::from_scale(SCALE, SCALE);
    resvg::render(&tree, scale, &mut pixels.as_mut());
    pixels.encode_png().map_err(|e| refused(e.to_string()))
}

#[cfg(not(feature = "png"))]
pub(crate) fn png(_svg: &str) -> Result<Vec<u8>> {
    Err(Error::Plot(
        "this build draws no PNG; build with --features png, or name a file that ends in .svg"
            .into(),
    ))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_fonts_licence_is_in_the_package() {
        let licence = include_str!("DejaVu-LICENSE.txt");
        for holder in [
            "Bitstream Vera Fonts Copyright",
            "Tavmjong Bah",
            "DejaVu changes",
        ] {
            assert!(licence.contains(holder), "{holder}");
        }
    }
}
