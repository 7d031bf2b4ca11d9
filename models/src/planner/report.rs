//! Estimates as text.

use super::step::Estimate;

/// `1536.` as `1.5 KiB`.
#[must_use]
pub fn human_bytes(bytes: f64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|unit| bytes >= f64::powi(2., unit.0));
    unit.map_or_else(|| format!("{bytes:.0} B"), |(power, name)| format!("{:.1} {name}", bytes / f64::powi(2., power)))
}

/// `0.0042` as `4.20 ms`.
#[must_use]
pub fn human_seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1. => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", 1e3 * s),
        s => format!("{:.1} µs", 1e6 * s),
    }
}

/// `262144` as `256K`.
#[must_use]
pub fn human_len(len: usize) -> String {
    let units = [(1 << 20, "M"), (1 << 10, "K")];
    let unit = units.into_iter().find(|(unit, _)| len >= *unit && len.is_multiple_of(*unit));
    unit.map_or_else(|| len.to_string(), |(unit, name)| format!("{}{name}", len / unit))
}

/// What a row says of an estimate, without its name.
pub(super) const COLUMNS: [&str; 10] =
    ["step", "tokens/s", "MFU", "attention", "idle", "exposed", "sent a rank", "to other nodes", "memory", "longest"];

/// One row: an estimate, and the longest sequence that fits.
pub(super) fn cells(estimate: &Estimate, longest: usize) -> [String; 10] {
    [
        human_seconds(estimate.seconds),
        format!("{:.0}", estimate.tokens / estimate.seconds),
        format!("{:.1} %", 100. * estimate.mfu),
        human_seconds(estimate.attention_seconds),
        estimate.idle_share.map_or_else(|| "–".to_string(), |idle| format!("{:.1} %", 100. * idle)),
        human_seconds(estimate.exposed_seconds),
        human_bytes(estimate.bytes_sent),
        human_bytes(estimate.bytes_to_other_nodes),
        human_bytes(estimate.memory) + if estimate.fits { "" } else { " (too much)" },
        human_len(longest),
    ]
}

/// One row per estimate, with the longest sequence that fits: `(estimate, longest)`.
#[must_use]
pub fn table(rows: &[(Estimate, usize)]) -> String {
    let named = |name: String, cells: [String; 10]| std::iter::once(name).chain(cells).collect::<Vec<_>>();
    let of_row =
        |(estimate, longest): &(Estimate, usize)| named(estimate.method.to_string(), cells(estimate, *longest));
    let mut rows: Vec<Vec<String>> = rows.iter().map(of_row).collect();
    rows.insert(0, named("strategy".to_string(), COLUMNS.map(str::to_string)));
    let widths: Vec<usize> =
        (0..rows[0].len()).map(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cell = |(i, text): (usize, &String)| {
            if i == 0 { format!("{text:<0$}", widths[i]) } else { format!("{text:>0$}", widths[i]) }
        };
        row.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ").trim_end().to_string() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!([1., 1536., 3. * f64::powi(2., 30)].map(human_bytes), ["1 B", "1.5 KiB", "3.0 GiB"]);
        assert_eq!([2.5, 0.0042, 3e-6].map(human_seconds), ["2.50 s", "4.20 ms", "3.0 µs"]);
        assert_eq!([262_144, 3 << 20, 1000].map(human_len), ["256K", "3M", "1000"]);
    }
}
