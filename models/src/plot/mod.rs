//! Pictures as SVG files: how a training run went, and who computes what in a schedule.

mod curves;
mod loss;
mod timeline;

pub use curves::{Curve, curves};
pub use loss::loss_curve;
pub use timeline::schedule_timeline;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::io;
use std::path::{Path, PathBuf};

/// Why a picture could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// Plotters could not draw it.
    #[error("cannot draw the picture: {0}")]
    Draw(String),
    /// The file could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// Where it should have gone.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl From<DrawingAreaErrorKind<io::Error>> for PlotError {
    fn from(error: DrawingAreaErrorKind<io::Error>) -> Self {
        Self::Draw(error.to_string())
    }
}

// Blue, orange and vermilion after Okabe and Ito, told apart under every common colour blindness.
const BLUE: RGBColor = RGBColor(0, 114, 178);
const ORANGE: RGBColor = RGBColor(240, 172, 60);
const VERMILION: RGBColor = RGBColor(213, 94, 0);
const INK: RGBColor = RGBColor(34, 34, 34);
const MUTED: RGBColor = RGBColor(102, 102, 102);
const RULE: RGBColor = RGBColor(190, 190, 190);
const PALE: RGBColor = RGBColor(234, 234, 234);

/// Font sizes in pixels.
const TITLE: f64 = 18.;
const BODY: f64 = 13.;
const SMALL: f64 = 11.;

/// A page measured in pixels from its top left corner.
type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The SVG of what `draw` puts on a white page of `size` pixels.
fn picture(size: (u32, u32), draw: impl FnOnce(&Canvas) -> Result<(), PlotError>) -> Result<String, PlotError> {
    let mut svg = String::new();
    let canvas = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    canvas.fill(&WHITE)?;
    draw(&canvas)?;
    canvas.present()?;
    drop(canvas);
    Ok(svg)
}

fn save(path: &Path, svg: &str) -> Result<(), PlotError> {
    std::fs::write(path, svg).map_err(|source| PlotError::Write { path: path.to_path_buf(), source })
}

/// Sans-serif of `size` pixels, hung by its vertical centre.
fn font(size: f64, color: RGBColor, align: HPos) -> TextStyle<'static> {
    // The SVG backend divides sizes by 1.24.
    ("sans-serif", 1.24 * size).into_font().color(&color).pos(Pos::new(align, VPos::Center))
}

/// Pixels `text` takes, generously: SVG leaves the face to the viewer.
fn text_width(text: &str, size: f64) -> i32 {
    (0.58 * size * text.chars().count() as f64).ceil() as i32
}

fn write(canvas: &Canvas, text: &str, at: (i32, i32), style: TextStyle) -> Result<(), PlotError> {
    Ok(canvas.draw(&Text::new(text, at, style))?)
}

fn fill(canvas: &Canvas, corners: [(i32, i32); 2], color: impl Into<ShapeStyle>) -> Result<(), PlotError> {
    Ok(canvas.draw(&Rectangle::new(corners, color.into().filled()))?)
}

/// The title over a picture, its left edge at `x`.
fn headline(canvas: &Canvas, x: i32, title: &str) -> Result<(), PlotError> {
    let mut bold = font(TITLE, INK, HPos::Left);
    bold.font = bold.font.style(FontStyle::Bold);
    write(canvas, title, (x, 28), bold)
}

/// One entry of a legend: a swatch `thickness` pixels high, and what it means.
struct Key<'a> {
    color: RGBAColor,
    thickness: i32,
    meaning: &'a str,
}

const SWATCH: i32 = 18;
const GAP: i32 = 7;

/// Pixels from the first swatch of a legend to where another would begin.
fn legend_width(keys: &[Key]) -> i32 {
    keys.iter().map(|key| SWATCH + 3 * GAP + text_width(key.meaning, BODY)).sum()
}

/// A row of keys from `left` on, centred on `y`.
fn legend(canvas: &Canvas, (left, y): (i32, i32), keys: &[Key]) -> Result<(), PlotError> {
    for (i, key) in keys.iter().enumerate() {
        let x = left + legend_width(&keys[..i]);
        let (top, end) = (y - key.thickness / 2, x + SWATCH);
        fill(canvas, [(x, top), (end, top + key.thickness)], key.color)?;
        write(canvas, key.meaning, (end + GAP, y), font(BODY, MUTED, HPos::Left))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_named_in_the_error() {
        let directory = std::env::temp_dir();
        let error = save(&directory, "<svg/>").unwrap_err();
        assert!(matches!(error, PlotError::Write { .. }));
        assert!(error.to_string().contains(&directory.display().to_string()), "{error}");
    }

    #[test]
    fn text_is_escaped_and_sized_in_pixels() {
        let svg = picture((100, 50), |canvas| headline(canvas, 0, "a < b & c")).unwrap();
        assert!(svg.contains("a &lt; b &amp; c"), "{svg}");
        assert!(svg.contains(r#"font-size="18"#), "{svg}");
        assert!(svg.trim_end().ends_with("</svg>"), "{svg}");
    }
}
