//! `distflash schedule`.

use super::Failure;
use crate::planner::{MaskKind, human_bytes};
use burn_distflash::schedule::{AttentionShape, Pair, Pass};
use burn_distflash::{Plan, Strategy};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

/// Print who computes what, and when, as text or JSON.
///
/// `q3·kv1` is the queries of rank 3 over the keys and values of rank 1; one line a step, one column a rank. Where
/// ranks share heads, a column is a group of them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  distflash schedule --ranks 8
  distflash schedule --ranks 4 --strategy adaptive --mask documents:1000 --seq-len 5000 --json")]
pub struct ScheduleCommand {
    /// The strategy; see `distflash train --help`.
    #[arg(long, default_value = "balanced")]
    strategy: Strategy,
    /// Ranks.
    #[arg(long, default_value = "4", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// Tokens of the sequence; K and M are powers of 1024.
    #[arg(long, value_name = "TOKENS", default_value = "4096", value_parser = len)]
    seq_len: usize,
    /// causal, full, window:<keys>, or documents:<tokens each>.
    #[arg(long, default_value = "causal", value_parser = mask)]
    mask: MaskKind,
    /// Query heads, for the bytes.
    #[arg(long, default_value = "32", value_parser = count)]
    heads: usize,
    /// Key/value heads.
    #[arg(long, default_value = "8", value_parser = count)]
    kv_heads: usize,
    /// Elements of one head's vector.
    #[arg(long, default_value = "128", value_parser = count)]
    head_dim: usize,
    /// Of the forward or the backward pass.
    #[arg(long, value_enum, default_value = "forward")]
    pass: PassName,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PassName {
    Forward,
    Backward,
}

/// From 1 to 65536.
fn count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=1 << 16).contains(count));
    count.ok_or_else(|| format!("`{text}` is not between 1 and 65536"))
}

/// Tokens up to which a schedule is printed: it is counted token by token.
const MOST_TOKENS: usize = 16 << 20;

/// `256K` as 262144.
pub(super) fn len(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix(['M', 'm']).map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    let count: usize =
        digits.parse().map_err(|_| format!("`{text}` is no number of tokens; expected 4096, 128K, 1M or the like"))?;
    let len = count.checked_mul(unit).filter(|&len| len > 0 && u32::try_from(len).is_ok());
    len.ok_or_else(|| format!("`{text}` is not between 1 and 4095M tokens"))
}

/// `window:4K` as a window of 4096 keys.
pub(super) fn mask(text: &str) -> Result<MaskKind, String> {
    match text.split_once(':') {
        None if text == "causal" => Ok(MaskKind::Causal),
        None if text == "full" => Ok(MaskKind::Full),
        Some(("window", keys)) => Ok(MaskKind::Window(len(keys)?)),
        Some(("documents", each)) => Ok(MaskKind::Documents(len(each)?)),
        _ => Err(format!("unknown mask `{text}`; expected causal, full, window:<keys> or documents:<tokens each>")),
    }
}

impl ScheduleCommand {
    pub(super) fn run(self) -> Result<String, Failure> {
        let refused = |error: &dyn ToString| Failure::Refused(error.to_string());
        let Self { heads, kv_heads, head_dim, .. } = self;
        if self.seq_len > MOST_TOKENS {
            return Err(Failure::Refused(format!("{} tokens; a schedule is printed for at most 16M", self.seq_len)));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(Failure::Refused(format!(
                "{heads} query heads do not divide evenly over {kv_heads} key/value heads"
            )));
        }
        let shape = AttentionShape { batch: 1, heads, kv_heads, head_dim, element_bytes: 2 };
        let mask = self.mask.build(self.seq_len).map_err(|error| refused(&error))?;
        let plan = Plan::new(self.strategy, &mask, self.seq_len, self.ranks as usize, shape)
            .map_err(|error| refused(&error))?;
        let pass = match self.pass {
            PassName::Forward => Pass::Forward,
            PassName::Backward => Pass::Backward,
        };
        if self.json {
            let text = serde_json::to_string_pretty(&as_json(&plan, pass))
                .map_err(|error| Failure::Failed(error.to_string()))?;
            return Ok(text + "\n");
        }
        let cost = plan.simulate(pass);
        let sent: u64 = (0..self.ranks as usize).map(|rank| cost.bytes_sent(rank)).sum();
        Ok(format!(
            "{}idle share {:.1} %, slowest rank {:.1} % above the mean, {} sent a rank in the mean\n",
            plan.schedule(pass),
            100. * cost.idle_share(),
            100. * cost.imbalance(),
            human_bytes(sent as f64 / f64::from(self.ranks)),
        ))
    }
}

fn as_json(plan: &Plan, pass: Pass) -> Value {
    let schedule = plan.schedule(pass);
    let cost = plan.simulate(pass);
    let chunk = |chunk: &burn_distflash::schedule::Chunk| json!({ "owner": chunk.owner, "rows": [chunk.rows.start, chunk.rows.end] });
    let pair = |pair: &Pair| json!({ "query": chunk(&pair.query), "key_value": chunk(&pair.key_value), "area": plan.sharded_mask().pair_area(pair) });
    let transfer = |transfer: burn_distflash::schedule::Transfer| {
        json!({
            "from": transfer.from, "to": transfer.to, "payload": format!("{:?}", transfer.payload),
            "chunk": chunk(&transfer.chunk), "bytes": plan.shape().bytes(&transfer, pass),
        })
    };
    let step = |t: usize| {
        let groups =
            (0..schedule.world_size()).map(|group| schedule.pairs(t, group).iter().map(pair).collect::<Vec<_>>());
        json!({
            "pairs": groups.collect::<Vec<_>>(),
            "inputs": schedule.inputs(t).into_iter().map(transfer).collect::<Vec<_>>(),
            "results": schedule.results(t, pass).into_iter().map(transfer).collect::<Vec<_>>(),
        })
    };
    let ranks = 0..plan.layout().world_size();
    let spans = |rank| {
        plan.layout().spans(rank).iter().map(|span| json!([span.start, span.len, span.step])).collect::<Vec<_>>()
    };
    json!({
        "strategy": plan.strategy().to_string(),
        "ranks_that_share_heads": plan.head_ranks(),
        "spans": ranks.clone().map(spans).collect::<Vec<_>>(),
        "bytes_sent": ranks.map(|rank| cost.bytes_sent(rank)).collect::<Vec<_>>(),
        "idle_share": cost.idle_share(),
        "steps": (0..schedule.num_steps()).map(step).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_masks_are_read_with_units() {
        assert_eq!(["4096", "128K", "1M"].map(|text| len(text).unwrap()), [4096, 1 << 17, 1 << 20]);
        for wrong in ["", "K", "-1", "0", "1G", "5000M"] {
            assert!(len(wrong).is_err(), "{wrong}");
        }
        assert_eq!(mask("window:4K"), Ok(MaskKind::Window(4096)));
        assert!(mask("diagonal").unwrap_err().contains("documents:<tokens each>"));
    }
}
