//! The training loss over steps.

use super::{BLUE, BODY, INK, Key, MUTED, PALE, PlotError, RULE, SMALL, VERMILION};
use super::{font, headline, legend, picture, save, write};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;
use std::ops::Range;
use std::path::Path;

const SIZE: (u32, u32) = (1000, 520);
const LEFT: i32 = 76;
const RIGHT: i32 = 70;

/// Draws the training loss of each step and its exponential moving average into the SVG file `path`,
/// with the loss of the best predictor that ignores context, `unigram_entropy`, for reference.
///
/// The average has a span of a fortieth of the points, so runs of up to 79 points are not smoothed;
/// its last value is written at its end. Points that are not finite are left out, as is such an entropy.
///
/// # Units
/// `losses` are pairs of step and loss, ascending by step. Losses and entropy are nats per token.
///
/// # Errors
/// [`PlotError::Write`] if the file cannot be written.
pub fn loss_curve(path: &Path, title: &str, losses: &[(usize, f64)], unigram_entropy: f64) -> Result<(), PlotError> {
    save(path, &draw(title, losses, unigram_entropy)?)
}

fn draw(title: &str, losses: &[(usize, f64)], unigram_entropy: f64) -> Result<String, PlotError> {
    let raw: Vec<(usize, f64)> = losses.iter().copied().filter(|(_, loss)| loss.is_finite()).collect();
    let span = (raw.len() / 40).max(1);
    let smooth = moving_average(&raw, span);
    let entropy = Some(unigram_entropy).filter(|entropy| entropy.is_finite());
    let (steps, range) = (step_range(&raw), loss_range(&raw, entropy));

    picture(SIZE, |canvas| {
        headline(canvas, LEFT, title)?;
        let bold = |meaning| Key { color: BLUE.into(), thickness: 3, meaning };
        let average = format!("exponential moving average, span {span} points");
        let keys = match span {
            1 => vec![bold("each step")],
            _ => vec![Key { color: BLUE.mix(0.35), thickness: 1, meaning: "each step" }, bold(&average)],
        };
        legend(canvas, (LEFT, 56), &keys)?;

        let mut chart = ChartBuilder::on(canvas)
            .margin_top(80)
            .margin_right(RIGHT)
            .margin_bottom(12)
            .margin_left(18)
            .x_label_area_size(46)
            .y_label_area_size(LEFT - 18)
            .build_cartesian_2d(steps.clone(), range.clone())?;
        let precision = decimals(&range);
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(PALE)
            .axis_style(RULE)
            .set_all_tick_mark_size(4)
            .x_labels(9)
            .y_labels(7)
            .y_label_formatter(&|loss| format!("{loss:.precision$}"))
            .label_style(font(SMALL, MUTED, HPos::Center))
            .axis_desc_style(font(BODY, INK, HPos::Center))
            .x_desc("step")
            .y_desc("training loss (nats per token)")
            .draw()?;

        let pixel = |point: (usize, f64)| chart.plotting_area().map_coordinate(&point);
        let end = smooth.last().copied();
        if let Some(entropy) = entropy {
            let (right, y) = pixel((steps.end, entropy));
            // On the side of the line where the curve does not end.
            let above = end.is_none_or(|(_, loss)| loss <= entropy);
            let label = format!("unigram entropy of the text: {entropy:.2} nats per token");
            let at = (right - 6, if above { y - 11 } else { y + 11 });
            write(canvas, &label, at, font(SMALL, VERMILION, HPos::Right))?;
        }
        if let Some(end @ (_, loss)) = end {
            let (x, y) = pixel(end);
            write(canvas, &format!("{loss:.3}"), (x + 8, y), font(BODY, BLUE, HPos::Left))?;
        }

        chart.draw_series(LineSeries::new(raw, BLUE.mix(0.35)))?;
        chart.draw_series(LineSeries::new(smooth, BLUE.stroke_width(2)))?;
        chart.draw_series(end.map(|point| Circle::new(point, 3, BLUE.filled())))?;
        if let Some(entropy) = entropy {
            let line = [(steps.start, entropy), (steps.end, entropy)];
            chart.draw_series(DashedLineSeries::new(line, 7, 5, VERMILION.stroke_width(1)))?;
        }
        Ok(())
    })
}

/// Exponential moving average of `span` points, `α = 2 / (span + 1)`, over the points there are so
/// far: without the division by the weights' sum, the start would be pulled towards 0.
fn moving_average(points: &[(usize, f64)], span: usize) -> Vec<(usize, f64)> {
    let keep = 1. - 2. / (span as f64 + 1.);
    let average = |(sum, weight): &mut (f64, f64), &(step, loss): &(usize, f64)| {
        (*sum, *weight) = (keep * *sum + loss, keep * *weight + 1.);
        Some((step, *sum / *weight))
    };
    points.iter().scan((0., 0.), average).collect()
}

/// Never empty, as plotters divides by its length: a lone step stands at the end of its range.
fn step_range(points: &[(usize, f64)]) -> Range<usize> {
    let steps = || points.iter().map(|&(step, _)| step);
    let (first, last) = (steps().min().unwrap_or(0), steps().max().unwrap_or(0).max(1));
    first.min(last - 1)..last
}

/// All losses and the entropy with a little air, at least 0.2 nats high.
fn loss_range(points: &[(usize, f64)], entropy: Option<f64>) -> Range<f64> {
    let values = || points.iter().map(|&(_, loss)| loss).chain(entropy);
    let (low, high) = (values().reduce(f64::min).unwrap_or(0.), values().reduce(f64::max).unwrap_or(1.));
    let air = (0.06 * (high - low)).max(0.1);
    low - air..high + air
}

/// Digits after the point that tell seven labels of `range` apart.
fn decimals(range: &Range<f64>) -> usize {
    (1. - (range.end - range.start).log10()).ceil().max(0.) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points_of(svg: &str) -> usize {
        let line = svg.lines().find(|line| line.starts_with("<polyline") && line.contains("opacity=\"0.35\""));
        line.and_then(|line| line.split("points=\"").nth(1)).map_or(0, |points| points.matches(',').count())
    }

    #[test]
    fn title_units_reference_and_last_value_are_written() {
        let losses: Vec<(usize, f64)> = (0..10).map(|step| (step, 5. - 0.3 * step as f64)).collect();
        let svg = draw("A run", &losses, 3.25).unwrap();
        for text in ["A run\n", "nats per token)", "unigram entropy of the text: 3.25 nats", "2.300\n", "step\n"] {
            assert!(svg.contains(text), "no `{text}` in {svg}");
        }
        assert_eq!(points_of(&svg), 10);
    }

    #[test]
    fn points_that_are_not_finite_are_left_out() {
        let losses = [(0, 4.), (1, f64::NAN), (2, 3.), (3, f64::INFINITY), (4, 2.), (5, f64::NEG_INFINITY)];
        let svg = draw("", &losses, f64::NAN).unwrap();
        assert_eq!(points_of(&svg), 3);
        assert!(svg.contains("2.000\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(!svg.contains("unigram"), "{svg}");
    }

    #[test]
    fn one_point_equal_points_and_no_point_are_drawn() {
        assert!(draw("", &[(7, 3.5)], 3.5).unwrap().contains("3.500\n"));
        assert!(draw("", &[(7, 3.5), (7, 3.5), (8, 3.5)], 3.5).unwrap().contains("3.500\n"));
        assert!(draw("", &[(0, f64::NAN)], f64::NAN).unwrap().contains("nats per token"));
        assert!(draw("", &[(usize::MAX, f64::from(f32::MAX))], 1.).is_ok());
    }

    #[test]
    fn the_average_of_equal_values_is_that_value_from_the_start() {
        let flat: Vec<(usize, f64)> = (0..50).map(|step| (step, 2.5)).collect();
        assert!(moving_average(&flat, 20).iter().all(|(_, loss)| (loss - 2.5).abs() < 1e-12));
    }

    #[test]
    fn the_average_of_two_values_weighs_the_later_one_more() {
        // Span 3: α = 1/2, so the weights are 1/2 and 1.
        assert_eq!(moving_average(&[(0, 0.), (1, 3.)], 3), [(0, 0.), (1, 2.)]);
    }
}
