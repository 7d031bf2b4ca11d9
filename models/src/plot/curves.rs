//! Curves over a logarithmic axis.

use super::{BLUE, BODY, INK, Key, MUTED, ORANGE, PlotError, RULE, SMALL, VERMILION, font, headline, legend, picture};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

const WIDTH: u32 = 560;
const HEIGHT: u32 = 360;
const GREEN: RGBColor = RGBColor(0, 158, 115);
const PURPLE: RGBColor = RGBColor(146, 84, 150);
const COLORS: [RGBColor; 5] = [BLUE, ORANGE, VERMILION, GREEN, PURPLE];

/// A line of `(x, y)` points.
pub struct Curve {
    /// What it is of.
    pub name: String,
    /// By rising x.
    pub points: Vec<(f64, f64)>,
}

/// An SVG of at most five curves over x, which doubles from tick to tick, with y from 0 on.
///
/// # Errors
/// If plotters cannot draw it.
pub fn curves(
    title: &str,
    x_desc: &str,
    x_label: &dyn Fn(&f64) -> String,
    y_desc: &str,
    curves: &[Curve],
) -> Result<String, PlotError> {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let (low, high) = points().fold((f64::MAX, 1f64), |(low, high), point| (low.min(point.0), high.max(point.0)));
    let top = points().fold(0f64, |most, point| most.max(point.1)).max(1e-9);
    let doublings: Vec<f64> =
        std::iter::successors(Some(low), |x| Some(2. * x)).take_while(|x| *x <= high * 1.01).collect();
    picture((WIDTH, HEIGHT), |canvas| {
        headline(canvas, 20, title)?;
        let keys: Vec<Key> = curves
            .iter()
            .zip(COLORS)
            .map(|(curve, color)| Key { color: color.into(), thickness: 3, meaning: &curve.name })
            .collect();
        for (row, keys) in keys.chunks(3).enumerate() {
            legend(canvas, (20, 54 + 18 * row as i32), keys)?;
        }
        let mut chart = ChartBuilder::on(canvas)
            .margin_top(if curves.len() > 3 { 84 } else { 66 })
            .margin_right(24)
            .margin_bottom(6)
            .x_label_area_size(42)
            .y_label_area_size(58)
            .build_cartesian_2d(
                (low..high.max(2. * low)).log_scale().base(2.).with_key_points(doublings),
                0. ..1.08 * top,
            )?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(RULE.mix(0.5))
            .axis_style(RULE)
            .x_labels(12)
            .x_label_formatter(&|x| x_label(x))
            .y_labels(6)
            .label_style(font(SMALL, MUTED, HPos::Center))
            .axis_desc_style(font(BODY, INK, HPos::Center))
            .x_desc(x_desc)
            .y_desc(y_desc)
            .draw()?;
        for (curve, color) in curves.iter().zip(COLORS) {
            chart.draw_series(LineSeries::new(curve.points.iter().copied(), color.stroke_width(2)))?;
            chart.draw_series(curve.points.iter().map(|&point| Circle::new(point, 3, color.filled())))?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_curve_is_named_and_drawn() {
        let curve = |name: &str| Curve { name: name.into(), points: vec![(1., 2.), (2., 3.), (4., 5.)] };
        let svg =
            curves("Speed", "ranks", &|x| format!("{x}"), "tokens/s", &[curve("ring"), curve("balanced")]).unwrap();
        for text in ["Speed", "ranks", "tokens/s", "ring", "balanced"] {
            assert!(svg.contains(text), "no {text} in {svg}");
        }
        assert!(svg.matches("<polyline").count() >= 2);
        assert_eq!(svg.matches("<circle").count(), 6);
    }
}
