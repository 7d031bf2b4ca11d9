//! A schedule over time.

use super::{BLUE, BODY, Canvas, GAP, INK, Key, MUTED, ORANGE, PALE, PlotError, RULE, SMALL};
use super::{fill, font, headline, legend, legend_width, picture, save, text_width, write};
use burn_distflash::Plan;
use burn_distflash::schedule::Pass;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;
use std::ops::Range;
use std::path::Path;

const WIDTH: i32 = 1100;
const LEFT: i32 = 84;
const RIGHT: i32 = 28;
/// Where the lanes begin, how high one is, and from one to the next.
const TOP: i32 = 108;
const LANE: i32 = 28;
const PITCH: i32 = 34;

/// Draws who computes what in the forward pass, and when, into the SVG file `path`: one lane per rank, or per
/// group of ranks that share heads, one box per pair, and under the start of each step the number of chunks
/// that have to arrive for it.
///
/// # Units
/// Time is work, in unmasked (query, key) pairs of tokens, as in
/// [`Simulation`](burn_distflash::schedule::Simulation): a step lasts as long as its slowest rank
/// works. Transfers take no time.
///
/// # Errors
/// [`PlotError::Write`] if the file cannot be written.
pub fn schedule_timeline(path: &Path, title: &str, plan: &Plan) -> Result<(), PlotError> {
    save(path, &draw(title, plan)?)
}

fn draw(title: &str, plan: &Plan) -> Result<String, PlotError> {
    let (schedule, mask) = (plan.schedule(Pass::Forward), plan.sharded_mask());
    let simulation = schedule.simulate(mask, plan.shape(), Pass::Forward);
    let lasts: Vec<u64> = simulation.work().iter().map(|step| step.iter().max().copied().unwrap_or(0)).collect();
    let total: u64 = lasts.iter().sum();
    let x = |work: u64| LEFT + (f64::from(WIDTH - LEFT - RIGHT) * work as f64 / total.max(1) as f64).round() as i32;
    let bottom = lane(schedule.world_size());
    let idle_share = plan.simulate(Pass::Forward).idle_share();
    let (ranks, steps) = (count(plan.layout().world_size(), "rank"), count(schedule.num_steps(), "step"));
    let subtitle = format!("{ranks}, {steps}, idle share {:.1} %", 100. * idle_share);

    picture((WIDTH as u32, bottom as u32 + 86), |canvas| {
        headline(canvas, LEFT, title)?;
        write(canvas, &subtitle, (LEFT, 56), font(BODY, INK, HPos::Left))?;
        draw_legend(canvas)?;
        draw_axis(canvas, bottom + 30, total)?;
        for rank in 0..schedule.world_size() {
            let at = (LEFT - 14, lane(rank) + LANE / 2);
            write(canvas, &lane_name(plan, rank), at, font(BODY, INK, HPos::Right))?;
        }
        write(canvas, "chunks in", (LEFT - 14, bottom + 14), font(SMALL, MUTED, HPos::Right))?;

        let mut start = 0;
        for (step, last) in lasts.iter().enumerate() {
            let end = start + last;
            draw_border(canvas, x(start)..x(end), bottom, step, schedule.inputs(step).len())?;
            for rank in 0..schedule.world_size() {
                let mut from = start;
                for pair in schedule.pairs(step, rank) {
                    let to = from + mask.pair_area(pair);
                    let color = if pair.query.owner == rank { BLUE } else { ORANGE };
                    draw_box(canvas, lane(rank), x(from)..x(to), color, &schedule.label(pair))?;
                    from = to;
                }
                draw_box(canvas, lane(rank), x(from)..x(end), PALE, "")?;
            }
            start = end;
        }
        draw_rule(canvas, x(total), bottom)
    })
}

/// The upper edge of a rank's lane, and of the space under the last.
fn lane(rank: usize) -> i32 {
    TOP + PITCH * rank as i32
}

fn lane_name(plan: &Plan, group: usize) -> String {
    let first = group * plan.head_ranks();
    if plan.head_ranks() == 1 {
        format!("rank {group}")
    } else {
        format!("{first}–{}", first + plan.head_ranks() - 1)
    }
}

fn draw_legend(canvas: &Canvas) -> Result<(), PlotError> {
    let key = |color: RGBColor, meaning| Key { color: color.into(), thickness: 12, meaning };
    let keys = [key(BLUE, "own queries"), key(ORANGE, "helping another rank"), key(PALE, "idle")];
    legend(canvas, (WIDTH - RIGHT - legend_width(&keys) + 2 * GAP, 56), &keys)
}

fn draw_axis(canvas: &Canvas, y: i32, total: u64) -> Result<(), PlotError> {
    let mut chart = ChartBuilder::on(canvas)
        .margin_top(y)
        .margin_right(RIGHT)
        .margin_bottom(8)
        .x_label_area_size(44)
        .y_label_area_size(LEFT)
        .build_cartesian_2d(0. ..total.max(1) as f64, 0..1)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .disable_y_axis()
        .axis_style(RULE)
        .set_all_tick_mark_size(4)
        .x_labels(if total > 0 { 9 } else { 1 })
        .x_label_formatter(&|work| compact(*work))
        .label_style(font(SMALL, MUTED, HPos::Center))
        .axis_desc_style(font(BODY, INK, HPos::Center))
        .x_desc("time, in units of work (unmasked query–key pairs)")
        .draw()?;
    Ok(())
}

fn draw_rule(canvas: &Canvas, x: i32, bottom: i32) -> Result<(), PlotError> {
    fill(canvas, [(x, TOP - 10), (x + 1, bottom + 4)], RULE)
}

/// Where `step` begins: its name above, the chunks that arrive for it below.
fn draw_border(canvas: &Canvas, x: Range<i32>, bottom: i32, step: usize, chunks: usize) -> Result<(), PlotError> {
    draw_rule(canvas, x.start, bottom)?;
    if let Some(name) = fitting([format!("step {step}"), step.to_string()], &x) {
        write(canvas, &name, (x.start, TOP - 20), font(SMALL, MUTED, HPos::Left))?;
    }
    if let Some(chunks) = fitting([chunks.to_string()], &x) {
        write(canvas, &chunks, (x.start, bottom + 14), font(SMALL, MUTED, HPos::Center))?;
    }
    Ok(())
}

fn draw_box(canvas: &Canvas, top: i32, x: Range<i32>, color: RGBColor, label: &str) -> Result<(), PlotError> {
    if x.is_empty() {
        return Ok(());
    }
    // Air on both sides keeps neighbours and step borders apart.
    let (left, right) = (x.start + 2, (x.end - 1).max(x.start + 3));
    fill(canvas, [(left, top), (right, top + LANE)], color)?;
    if let Some(label) = fitting([label.to_string(), without_rows(label)], &x) {
        let ink = if color == BLUE { WHITE } else { INK };
        write(canvas, &label, ((left + right) / 2, top + LANE / 2), font(SMALL, ink, HPos::Center))?;
    }
    Ok(())
}

/// The first text that fits between two pixels, with some air.
fn fitting<const N: usize>(texts: [String; N], x: &Range<i32>) -> Option<String> {
    texts.into_iter().find(|text| text_width(text, SMALL) + 6 <= x.end - x.start)
}

/// `q3[0..8]·kv1` as `q3… kv1`.
fn without_rows(label: &str) -> String {
    let parts = label.split('[').map(|part| part.split_once(']').map_or(part, |(_, rest)| rest));
    parts.collect::<Vec<_>>().join("…").replace("…·", "… ")
}

fn count(of: usize, what: &str) -> String {
    format!("{of} {what}{}", if of == 1 { "" } else { "s" })
}

/// `1500.` as `1.5k`.
fn compact(work: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (unit, name) = units.into_iter().find(|(unit, _)| work >= *unit).unwrap_or((1., ""));
    format!("{}{name}", (100. * work / unit).round() / 100.)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_distflash::schedule::AttentionShape;
    use burn_distflash::{Mask, RowIntervals, Sequence, Strategy};

    fn plan(strategy: impl Into<Strategy>, mask: &Mask, seq_len: usize, world: usize) -> Plan {
        let shape = AttentionShape { batch: 1, heads: 4, kv_heads: 2, head_dim: 8, element_bytes: 4 };
        Plan::new(strategy.into(), mask, seq_len, world, shape).unwrap()
    }

    fn causal(strategy: impl Into<Strategy>, world: usize) -> Plan {
        plan(strategy, &Mask::causal(), 64 * world, world)
    }

    #[test]
    fn every_lane_step_and_pair_is_labelled() {
        let plan = causal(Sequence::Balanced, 5);
        let svg = draw("Five ranks", &plan).unwrap();
        for text in ["Five ranks", "rank 0", "rank 4", "own queries", "helping another rank", "idle"] {
            assert!(svg.contains(&format!(">\n{text}\n")), "no `{text}` in {svg}");
        }
        let schedule = plan.schedule(Pass::Forward);
        for (step, _, pair) in schedule.iter() {
            assert!(svg.contains(&format!("step {step}\n")), "{svg}");
            assert!(svg.contains(&format!("{}\n", schedule.label(pair))), "{svg}");
            assert!(svg.contains(&format!(">\n{}\n", schedule.inputs(step).len())), "{svg}");
        }
    }

    #[test]
    fn the_idle_share_is_that_of_the_simulation() {
        for sequence in [Sequence::Ring, Sequence::Balanced] {
            let plan = causal(sequence, 7);
            let share = 100. * plan.simulate(Pass::Forward).idle_share();
            let steps = plan.schedule(Pass::Forward).num_steps();
            assert!(draw("", &plan).unwrap().contains(&format!("7 ranks, {steps} steps, idle share {share:.1} %\n")));
        }
        // A ring of two, of 64 tokens each: 64² of 2 (64·65/2 + 64²) slots are idle.
        assert!(draw("", &causal(Sequence::Ring, 2)).unwrap().contains("idle share 33.2 %\n"));
    }

    #[test]
    fn helpers_have_their_own_colour() {
        // In a world of 3, rank 0 helps once; the legend shows each colour once more.
        let boxes = |svg: &str, color: &str| svg.matches(&format!("fill=\"{color}\" stroke")).count();
        let svg = draw("", &causal(Sequence::Balanced, 3)).unwrap();
        assert_eq!((boxes(&svg, "#0072B2"), boxes(&svg, "#F0AC3C")), (1 + 5, 1 + 1), "{svg}");
    }

    #[test]
    fn every_world_fits_and_an_empty_schedule_has_lanes() {
        for world in 1..=16 {
            for strategy in Strategy::all_for(world) {
                let plan = causal(strategy, world);
                let svg = draw("", &plan).unwrap();
                assert!(svg.contains(&lane_name(&plan, plan.schedule(Pass::Forward).world_size() - 1)));
            }
        }
        let nothing = Mask::explicit(RowIntervals::new(vec![0; 8], vec![0; 8], 8).unwrap());
        let svg = draw("", &plan(Sequence::Balanced, &nothing, 8, 2)).unwrap();
        assert!(svg.contains("2 ranks, 0 steps, idle share 0.0 %\n") && svg.contains("rank 1\n"), "{svg}");
    }

    #[test]
    fn labels_shorten_before_they_vanish() {
        assert_eq!(without_rows("q3[0..8]·kv1[2..4]"), "q3… kv1…");
        let texts = || ["q3[0..8]·kv1".to_string(), "q3… kv1".to_string()];
        assert_eq!(fitting(texts(), &(100..160)).as_deref(), Some("q3… kv1"));
        assert_eq!(fitting(texts(), &(100..120)), None);
    }

    #[test]
    fn work_is_counted_in_thousands() {
        assert_eq!([0., 999., 1500., 2e6].map(compact), ["0", "999", "1.5k", "2M"]);
    }
}
