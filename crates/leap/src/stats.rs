//! Rank correlations, shares of ordered pairs, percentiles and intervals, with nothing defined where a textbook leaves it undefined.

use statrs::distribution::{ContinuousCDF, StudentsT};
use std::cmp::Ordering;

/// Spearman's rank correlation: Pearson's correlation of average ranks. None for fewer than two pairs, unequal lengths,
/// a NaN or a constant input.
pub fn spearman(x: &[f64], y: &[f64]) -> Option<f64> {
    if !comparable(x, y) {
        return None;
    }
    let (rx, ry) = (average_ranks(x), average_ranks(y));
    // Ranks of n values have this mean whatever the ties.
    let centre = (x.len() as f64 + 1.0) / 2.0;
    let (mut sxy, mut sxx, mut syy) = (0.0, 0.0, 0.0);
    for (a, b) in rx.iter().zip(&ry) {
        let (dx, dy) = (a - centre, b - centre);
        sxy += dx * dy;
        sxx += dx * dx;
        syy += dy * dy;
    }
    if sxx == 0.0 || syy == 0.0 {
        return None;
    }
    Some((sxy / (sxx * syy).sqrt()).clamp(-1.0, 1.0))
}

/// Kendall's tau-b in O(n log n) (Knight, "A computer method for calculating Kendall's tau with ungrouped data", 1966).
/// None for fewer than two pairs, unequal lengths, a NaN or a constant input.
pub fn kendall_tau_b(x: &[f64], y: &[f64]) -> Option<f64> {
    if !comparable(x, y) {
        return None;
    }
    let mut pairs: Vec<(f64, f64)> = x.iter().copied().zip(y.iter().copied()).collect();
    pairs.sort_unstable_by(|a, b| compare(a.0, b.0).then(compare(a.1, b.1)));
    let tied_x = tied(&pairs, |a, b| a.0 == b.0);
    let tied_both = tied(&pairs, |a, b| a == b);
    let mut values: Vec<f64> = pairs.iter().map(|pair| pair.1).collect();
    let mut buffer = values.clone();
    let discordant = inversions(&mut values, &mut buffer);
    let tied_y = tied(&values, |a, b| a == b);
    let all = pairs_of(x.len() as u64);
    if tied_x == all || tied_y == all {
        return None;
    }
    let agreement = (all + tied_both) as i128 - (tied_x + tied_y) as i128 - 2 * discordant as i128;
    let scale = ((all - tied_x) as f64 * (all - tied_y) as f64).sqrt();
    Some((agreement as f64 / scale).clamp(-1.0, 1.0))
}

/// Share of the pairs whose lengths differ by `ratio` or more that the predictions order rightly; a pair that they tie
/// counts one half. O(n log n). None where there is no such pair, for unequal lengths, a NaN, a length that is not above
/// zero, or a ratio that is not above 1.
pub fn pairwise_accuracy(predicted: &[f64], lengths: &[f64], ratio: f64) -> Option<f64> {
    let positive = lengths.iter().all(|&l| l > 0.0 && l.is_finite());
    if !(comparable(predicted, lengths) && positive && ratio > 1.0) {
        return None;
    }
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_unstable_by(|&i, &j| compare(lengths[i], lengths[j]));
    let ranks = dense_ranks(predicted);
    let mut shorter = Counts::new(predicted.len());
    let (mut pairs, mut twice_right) = (0u64, 0u64);
    let mut next = 0;
    for &long in &order {
        // Divided, not multiplied: 6 / 5 rounds to the very number that 1.2 is read as.
        while lengths[long] / lengths[order[next]] >= ratio {
            shorter.add(ranks[order[next]]);
            next += 1;
        }
        pairs += next as u64;
        twice_right += shorter.below(ranks[long]) + shorter.below(ranks[long] + 1);
    }
    (pairs > 0).then(|| twice_right as f64 / (2 * pairs) as f64)
}

/// The `p`-th percentile (0 to 100) of ascending values, linear between order statistics as `numpy.percentile`. None
/// for no values or `p` outside its range.
pub fn percentile(sorted: &[f64], p: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    if !(0.0..=100.0).contains(&p) {
        return None;
    }
    let at = p / 100.0 * last as f64;
    let low = (at.floor() as usize).min(last);
    let (a, b) = (sorted[low], sorted[(low + 1).min(last)]);
    let share = at - low as f64;
    // Where there is nothing to interpolate, an infinite neighbour must not make it NaN.
    Some(if a == b || share == 0.0 { a } else { a + (b - a) * share })
}

/// Arithmetic mean; None for no values.
pub fn mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() { None } else { Some(values.iter().sum::<f64>() / values.len() as f64) }
}

/// Population standard deviation (divisor n, as `numpy.std`); None for no values.
pub fn std_pop(values: &[f64]) -> Option<f64> {
    let centre = mean(values)?;
    Some((values.iter().map(|v| (v - centre) * (v - centre)).sum::<f64>() / values.len() as f64).sqrt())
}

/// Mean over seeds and its 95 % confidence interval by Student's t; no interval for one value, NaN for none.
pub fn mean_ci95(values: &[f64]) -> (f64, Option<(f64, f64)>) {
    let Some(centre) = mean(values) else {
        return (f64::NAN, None);
    };
    let n = values.len() as f64;
    let interval = StudentsT::new(0.0, 1.0, n - 1.0).ok().zip(std_pop(values)).map(|(t, spread)| {
        // s / sqrt(n) with the sample deviation s equals the population deviation over sqrt(n - 1).
        let half = t.inverse_cdf(0.975) * spread / (n - 1.0).sqrt();
        (centre - half, centre + half)
    });
    (centre, interval)
}

fn comparable(x: &[f64], y: &[f64]) -> bool {
    x.len() == y.len() && x.len() >= 2 && !x.iter().chain(y).any(|v| v.is_nan())
}

/// Order of numbers without NaN in which both zeros are equal.
fn compare(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or(Ordering::Equal)
}

fn average_ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_unstable_by(|&i, &j| compare(values[i], values[j]));
    let mut ranks = vec![0.0; values.len()];
    let mut before = 0usize;
    for group in order.chunk_by(|&i, &j| values[i] == values[j]) {
        let rank = before as f64 + (group.len() as f64 + 1.0) / 2.0;
        group.iter().for_each(|&i| ranks[i] = rank);
        before += group.len();
    }
    ranks
}

/// Ranks from 0 on without gaps; equal values share one.
fn dense_ranks(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_unstable_by(|&i, &j| compare(values[i], values[j]));
    let mut ranks = vec![0; values.len()];
    for (rank, group) in order.chunk_by(|&i, &j| values[i] == values[j]).enumerate() {
        group.iter().for_each(|&i| ranks[i] = rank);
    }
    ranks
}

/// How many of the ranks added so far lie below one; a binary indexed tree (Fenwick, "A new data structure for
/// cumulative frequency tables", 1994).
struct Counts(Vec<u64>);

impl Counts {
    fn new(ranks: usize) -> Self {
        Self(vec![0; ranks + 1])
    }

    fn add(&mut self, rank: usize) {
        let mut node = rank + 1;
        while node < self.0.len() {
            self.0[node] += 1;
            node += node & node.wrapping_neg();
        }
    }

    fn below(&self, rank: usize) -> u64 {
        let (mut node, mut sum) = (rank, 0);
        while node > 0 {
            sum += self.0[node];
            node &= node - 1;
        }
        sum
    }
}

fn pairs_of(n: u64) -> u64 {
    n * n.saturating_sub(1) / 2
}

/// Pairs inside runs of equal neighbours.
fn tied<T>(sorted: &[T], equal: impl FnMut(&T, &T) -> bool) -> u64 {
    sorted.chunk_by(equal).map(|run| pairs_of(run.len() as u64)).sum()
}

/// Sorts `values` and counts the pairs that were strictly out of order.
fn inversions(values: &mut [f64], buffer: &mut [f64]) -> u64 {
    let n = values.len();
    if n < 2 {
        return 0;
    }
    let middle = n / 2;
    let (left_buffer, right_buffer) = buffer.split_at_mut(middle);
    let mut count = inversions(&mut values[..middle], left_buffer) + inversions(&mut values[middle..], right_buffer);
    buffer[..n].copy_from_slice(values);
    let (left, right) = buffer[..n].split_at(middle);
    let (mut i, mut j) = (0, 0);
    for out in values.iter_mut() {
        let take_left = j == right.len() || (i < left.len() && left[i] <= right[j]);
        if take_left {
            *out = left[i];
            i += 1;
        } else {
            *out = right[j];
            j += 1;
            count += (left.len() - i) as u64;
        }
    }
    count
}
