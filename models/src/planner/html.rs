//! A plan as a web page without scripts: the choice, the table, the timeline of one layer's attention, and curves over
//! length and number of devices.

use super::cluster::Cluster;
use super::events::{Activity, Timeline};
use super::report::{COLUMNS, cells, human_bytes, human_len, human_seconds};
use super::step::Estimate;
use super::workload::Workload;
use crate::method::Method;
use crate::plot::{Curve, PlotError, curves};
use burn_distflash::Strategy;
use std::fmt::Write;

/// Everything the page shows.
#[derive(Debug)]
pub struct Page<'a> {
    /// Of the model, as it is known.
    pub model: &'a str,
    /// What is trained.
    pub workload: &'a Workload,
    /// On what.
    pub cluster: &'a Cluster,
    /// Estimates with the longest sequence that fits, the chosen one among them.
    pub rows: &'a [(Estimate, usize)],
    /// The chosen one.
    pub chosen: &'a Estimate,
    /// Why.
    pub reason: &'a str,
}

/// Lanes drawn at most.
const MOST_LANES: usize = 32;

/// Text as it may stand in HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Page<'_> {
    /// The page.
    ///
    /// # Errors
    /// If a curve cannot be drawn.
    pub fn render(&self) -> Result<String, PlotError> {
        let Self { model, workload, cluster, chosen, reason, .. } = self;
        let title = format!("{model}, {} tokens, {}", human_len(workload.seq_len), cluster.name);
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, \
             initial-scale=1\">\n<title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{}</h1>\n<p class=\"lead\">{}</p>\n",
            escape(&title),
            escape(&title),
            escape(reason),
        );
        let facts = [
            ("step", human_seconds(chosen.seconds)),
            ("tokens/s", format!("{:.0}", chosen.tokens / chosen.seconds)),
            ("MFU", format!("{:.1} %", 100. * chosen.mfu)),
            ("memory a device", human_bytes(chosen.memory)),
            ("sent a rank", human_bytes(chosen.bytes_sent)),
        ];
        html += "<dl>\n";
        for (name, value) in facts {
            let _ = writeln!(html, "<div><dt>{name}</dt><dd>{value}</dd></div>");
        }
        html += "</dl>\n<h2>Strategies</h2>\n";
        html += &self.table();
        if let Some([forward, backward]) = &chosen.timelines {
            html += "<h2>Attention of one layer</h2>\n<p class=\"key\">";
            let keys = [
                ("own", "own queries"),
                ("help", "helping another rank"),
                ("heads", "all-to-all over heads"),
                ("idle", "waiting"),
            ];
            for (class, meaning) in keys {
                let _ = write!(html, "<span><i class=\"{class}\"></i>{meaning}</span> ");
            }
            html += "<span>Hover over a block for its pair.</span></p>\n";
            html += &lanes("forward", forward, cluster);
            html += &lanes("backward", backward, cluster);
        }
        html += "<h2>Over length and devices</h2>\n<div class=\"curves\">\n";
        html += &self.over_length()?;
        html += &self.over_devices()?;
        html += "</div>\n</main>\n</body>\n</html>\n";
        Ok(html)
    }

    fn table(&self) -> String {
        let head = COLUMNS.map(|name| format!("<th>{name}</th>")).concat();
        let mut html =
            format!("<div class=\"scroll\"><table>\n<thead><tr><th>strategy</th>{head}</tr></thead>\n<tbody>\n",);
        for (row, longest) in self.rows {
            let class = if row.method == self.chosen.method {
                " class=\"chosen\""
            } else if row.fits {
                ""
            } else {
                " class=\"unfit\""
            };
            let cells = cells(row, *longest).map(|cell| format!("<td>{cell}</td>")).concat();
            let _ = writeln!(html, "<tr{class}><th>{}</th>{cells}</tr>", escape(&row.method.to_string()));
        }
        html + "</tbody></table></div>\n"
    }

    /// The fastest five, and the chosen one.
    fn shown(&self) -> Vec<Method> {
        let is_shown = |method: &Method| matches!(method, Method::Context(s) if *s != Strategy::PaddedUlysses);
        let mut methods: Vec<Method> = self.rows.iter().map(|row| row.0.method).filter(is_shown).take(5).collect();
        if !methods.contains(&self.chosen.method) {
            let last = methods.len() - 1;
            methods[last] = self.chosen.method;
        }
        methods
    }

    fn over_length(&self) -> Result<String, PlotError> {
        let lens: Vec<usize> =
            (0..7).map(|i| (self.workload.seq_len >> 3) << i).filter(|&len| len >= self.cluster.num_devices).collect();
        let curve = |&method: &Method| {
            let at = |&seq_len: &usize| {
                let estimate = Workload { seq_len, ..self.workload.clone() }.estimate(method, self.cluster).ok()?;
                estimate.fits.then_some((seq_len as f64, 100. * estimate.mfu))
            };
            Curve { name: method.to_string(), points: lens.iter().filter_map(at).collect() }
        };
        let drawn: Vec<Curve> = self.shown().iter().map(curve).filter(|curve| !curve.points.is_empty()).collect();
        curves("Utilisation by length, where it fits", "tokens", &|x| human_len(x.round() as usize), "MFU, %", &drawn)
    }

    fn over_devices(&self) -> Result<String, PlotError> {
        let own = self.cluster.num_devices;
        let mut counts: Vec<usize> = (0..11).map(|i| 1 << i).filter(|&count| count <= 2 * own.max(4)).collect();
        counts.push(own);
        counts.sort_unstable();
        counts.dedup();
        let curve = |&method: &Method| {
            let at = |&count: &usize| {
                let estimate = self.workload.estimate(method, &self.cluster.clone().with_devices(count)).ok()?;
                Some((count as f64, estimate.tokens / estimate.seconds / 1e3))
            };
            Curve { name: method.to_string(), points: counts.iter().filter_map(at).collect() }
        };
        let drawn: Vec<Curve> = self.shown().iter().map(curve).filter(|curve| !curve.points.is_empty()).collect();
        curves("Throughput by devices, fitting or not", "devices", &|x| format!("{x:.0}"), "thousand tokens/s", &drawn)
    }
}

/// One pass as an SVG: a lane a rank, a block a pair, a title on each.
fn lanes(name: &str, timeline: &Timeline, cluster: &Cluster) -> String {
    const WIDTH: f64 = 1100.;
    const LEFT: f64 = 64.;
    const PITCH: f64 = 26.;
    let shown = timeline.ranks.len().min(MOST_LANES);
    let height = PITCH * shown as f64 + 34.;
    let x = |seconds: f64| LEFT + (WIDTH - LEFT - 12.) * seconds / timeline.seconds.max(1e-12);
    let (near, far) = timeline.bytes(cluster);
    let mut html = format!(
        "<h3>{name}: {}, {:.1} % idle, {} of transfers exposed; {} within nodes, {} between</h3>\n<div class=\"scroll\"><svg viewBox=\"0 0 {WIDTH} \
         {height}\" role=\"img\" aria-label=\"{name} pass by rank over time\">\n",
        human_seconds(timeline.seconds),
        100. * timeline.idle_share(),
        human_seconds(timeline.exposed_seconds()),
        human_bytes(near),
        human_bytes(far),
    );
    for (rank, spans) in timeline.ranks.iter().take(shown).enumerate() {
        let top = PITCH * rank as f64 + 2.;
        let _ = writeln!(html, "<text x=\"{}\" y=\"{}\" class=\"lane\">rank {rank}</text>", LEFT - 8., top + 15.);
        let _ = writeln!(
            html,
            "<rect x=\"{LEFT}\" y=\"{top}\" width=\"{:.1}\" height=\"20\" class=\"idle\"/>",
            x(timeline.seconds) - LEFT
        );
        for span in spans {
            let (class, what) = match &span.activity {
                Activity::Own(label) => ("own", label.as_str()),
                Activity::Help(label) => ("help", label.as_str()),
                Activity::HeadExchange => ("heads", "all-to-all over heads"),
            };
            let width = (x(span.end) - x(span.start) - 1.).max(0.5);
            let _ = write!(
                html,
                "<g><title>rank {rank}: {what}\n{} to {}</title><rect x=\"{:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"20\" class=\"{class}\"/>",
                human_seconds(span.start),
                human_seconds(span.end),
                x(span.start),
            );
            if width > 7. * what.chars().count() as f64 && class != "heads" {
                let _ = write!(
                    html,
                    "<text x=\"{:.1}\" y=\"{}\" class=\"{class}-text\">{what}</text>",
                    x(span.start) + width / 2.,
                    top + 14.
                );
            }
            html += "</g>\n";
        }
    }
    let bottom = PITCH * shown as f64 + 6.;
    for tick in 0..=4 {
        let at = timeline.seconds * f64::from(tick) / 4.;
        let anchor = if tick == 4 { "end" } else { "middle" };
        let _ = writeln!(
            html,
            "<text x=\"{:.1}\" y=\"{}\" class=\"tick\" text-anchor=\"{anchor}\">{}</text>",
            x(at),
            bottom + 16.,
            human_seconds(at)
        );
    }
    html += "</svg></div>\n";
    if shown < timeline.ranks.len() {
        let _ = writeln!(html, "<p class=\"key\">The first {shown} of {} ranks.</p>", timeline.ranks.len());
    }
    html
}

const STYLE: &str = "
:root { color-scheme: light; --ink: #222; --muted: #666; --rule: #d8d8d8; --blue: #0072b2; --orange: #f0ac3c; --green: #009e73; --pale: #eaeaea; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 8px; }
h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 14px; font-weight: 600; margin: 16px 0 6px; }
.lead { margin: 0 0 16px; color: var(--muted); max-width: 80ch; }
dl { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 0; }
dt { font-size: 12px; color: var(--muted); } dd { margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } .scroll svg { min-width: 760px; width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; width: 100%; }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--rule); }
th:first-child { text-align: left; position: sticky; left: 0; background: #fff; } thead th { font-size: 12px; color: var(--muted); font-weight: 600; }
tbody th { font-weight: 400; } tr.chosen th, tr.chosen td { background: #e8f2f8; font-weight: 600; } tr.unfit { color: #8a8a8a; }
.key { color: var(--muted); font-size: 13px; } .key span { white-space: nowrap; margin-right: 14px; } .key i { display: inline-block; width: 14px; height: 12px; margin-right: 5px; vertical-align: -1px; }
rect.own, i.own { fill: var(--blue); background: var(--blue); } rect.help, i.help { fill: var(--orange); background: var(--orange); }
rect.heads, i.heads { fill: var(--green); background: var(--green); } rect.idle, i.idle { fill: var(--pale); background: var(--pale); }
g:hover rect { stroke: var(--ink); stroke-width: 1.5; }
svg text { font: 11px system-ui, sans-serif; } .lane { text-anchor: end; fill: var(--ink); } .tick { fill: var(--muted); }
.own-text { fill: #fff; text-anchor: middle; } .help-text { fill: var(--ink); text-anchor: middle; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; } .curves svg { width: 100%; height: auto; }
";
