//! `auto`: the fastest strategy, and why.

use super::cluster::Cluster;
use super::report::{human_bytes, human_seconds};
use super::step::{Estimate, candidates};
use super::workload::Workload;
use crate::method::Method;
use burn_distflash::{PlanError, Strategy};

/// The fastest of all candidates.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Which.
    pub strategy: Strategy,
    /// Why, in a sentence.
    pub reason: String,
    /// All candidates, those that fit first, then by time.
    pub ranking: Vec<Estimate>,
}

/// The strategy that sends least of those within half a percent of the shortest step on `cluster`, among what fits if
/// anything does.
///
/// # Errors
/// If the mask does not fit the length.
pub fn choose(workload: &Workload, cluster: &Cluster) -> Result<Choice, PlanError> {
    let methods: Vec<Method> = candidates(cluster).into_iter().map(Method::Context).collect();
    let mut ranking = Vec::new();
    for method in methods {
        ranking.push(workload.estimate(method, cluster)?);
    }
    // What fits comes first.
    ranking.sort_by(|a, b| b.fits.cmp(&a.fits).then(a.seconds.total_cmp(&b.seconds)));
    let limit = 1.005 * ranking[0].seconds;
    let close = ranking.iter().filter(|estimate| estimate.fits == ranking[0].fits && estimate.seconds <= limit);
    let best = close.min_by(|a, b| a.bytes_sent.total_cmp(&b.bytes_sent)).expect("at least the fastest").clone();
    let Method::Context(strategy) = best.method else { unreachable!("only strategies were asked for") };
    let others = ranking.iter().filter(|estimate| estimate.method != best.method);
    let next = others.min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let compared = next.map_or_else(String::new, |next| {
        format!(
            "; {} takes {}, idles {:.1} % and sends {}",
            next.method,
            human_seconds(next.seconds),
            100. * next.idle_share.unwrap_or(0.),
            human_bytes(next.bytes_sent),
        )
    });
    let reason = format!(
        "{strategy}: {} a step, {:.1} % of attention's time idle, {} sent a rank, {} of it exposed{compared}",
        human_seconds(best.seconds),
        100. * best.idle_share.unwrap_or(0.),
        human_bytes(best.bytes_sent),
        human_seconds(best.exposed_seconds),
    );
    Ok(Choice { strategy, reason, ranking })
}
