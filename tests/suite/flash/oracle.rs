//! Attention in f64 over plain slices, pair by pair. It uses nothing of this crate except the definition of masks. All
//! other results are compared with it, and it also gives the sizes of the terms in each sum.

use super::problem::{Problem, Results};

/// The exact results, and the sizes that bound rounding errors.
#[derive(Clone, Debug)]
pub struct Oracle {
    pub results: Results,
    /// For each element of out, dq, dk and dv: the sum of the absolute values of its terms (see [`Head::attend`]). For
    /// lse: that of the row's score with the largest terms.
    pub terms: Results,
    /// The largest |score| after the scale (and the cap) that is passed to an exponential.
    pub largest_score: f64,
}

impl Oracle {
    pub fn of(problem: &Problem) -> Self {
        let sizes = problem.sizes;
        let empty = || Results {
            out: vec![0.0; problem.d_out.len()],
            lse: vec![f64::NEG_INFINITY; sizes.batch * sizes.heads * sizes.queries],
            dq: vec![0.0; problem.q.len()],
            dk: vec![0.0; problem.k.len()],
            dv: vec![0.0; problem.v.len()],
            d_bias: vec![0.0; problem.bias.as_ref().map_or(0, |bias| bias.data.len())],
        };
        let mut oracle = Self {
            results: empty(),
            terms: empty(),
            largest_score: 0.0,
        };
        oracle.terms.lse.fill(0.0);
        for batch_and_head in 0..sizes.batch * sizes.heads {
            let (batch, head) = (batch_and_head / sizes.heads, batch_and_head % sizes.heads);
            let kv_head = head * sizes.kv_heads / sizes.heads;
            let head = Head {
                batch,
                head,
                first_query: batch_and_head * sizes.queries,
                first_key: (batch * sizes.kv_heads + kv_head) * sizes.keys,
            };
            (0..sizes.queries).for_each(|query| head.attend(problem, query, &mut oracle));
        }
        oracle
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn dot_of_sizes(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

/// Computes `y += factor x`.
fn add(y: &mut [f64], factor: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// Computes `y += factor |x|`.
fn add_sizes(y: &mut [f64], factor: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x.abs();
    }
}

/// A query head with its key head, and the numbers of their first rows.
struct Head {
    batch: usize,
    head: usize,
    first_query: usize,
    first_key: usize,
}

impl Head {
    /// Adds the results of one query: its rows of out, lse and dq, and its contributions to dk and dv.
    ///
    /// With p = softmax(s) and the dropout factors f: out = sum_j f_j p_j v_j, dp_j = f_j dO v_j, D = dO out, ds_j =
    /// scale p_j (dp_j - D). Without dropout and cap, the terms are
    ///
    /// - of out: p_j |v_j|, summed over the keys;
    /// - of dv_j: p_j |dO|, summed over the queries;
    /// - of ds_j: m_j = |scale| p_j (|dO| |v_j| + |dO| (sum_k p_k |v_k|)), all that dp_j and D are sums of;
    /// - of dq: m_j |k_j|, and of dk_j: m_j |q|.
    fn attend(&self, problem: &Problem, query: usize, oracle: &mut Oracle) {
        let sizes = problem.sizes;
        let scale = problem.config.scale_for(sizes.head_dim);
        let visible = problem.seen(self.batch, self.head, query);
        let visible = visible.iter().copied();
        let bias = |key: usize| problem.bias_of([self.batch, self.head, query, key]);
        let elements = |row: usize, dim: usize| row * dim..(row + 1) * dim;
        let lse_at = self.first_query + query;
        let q_row = elements(lse_at, sizes.head_dim);
        let row = elements(lse_at, sizes.value_dim);
        let key = |j: usize| elements(self.first_key + j, sizes.head_dim);
        let value = |j: usize| elements(self.first_key + j, sizes.value_dim);
        let (q, d_out) = (&problem.q[q_row.clone()], &problem.d_out[row.clone()]);
        let Oracle {
            results,
            terms,
            largest_score,
        } = oracle;

        let capped = |score: f64| match problem.config.soft_cap {
            None => (score, 1.0),
            Some(cap) => {
                let share = (score / cap).tanh();
                (cap * share, 1.0 - share * share)
            }
        };
        let scores = visible
            .clone()
            .map(|j| capped(scale * dot(q, &problem.k[key(j)])));
        let (scores, slopes): (Vec<f64>, Vec<f64>) = scores.unzip();
        let biased = scores.iter().zip(visible.clone());
        let scores: Vec<f64> = biased.map(|(score, key)| score + bias(key)).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        if scores.is_empty() {
            return; // out stays 0, and lse -inf
        }
        *largest_score = scores.iter().fold(*largest_score, |a, s| a.max(s.abs()));
        results.lse[lse_at] = top + sum.ln();
        let score_terms = |j| scale.abs() * dot_of_sizes(q, &problem.k[key(j)]) + bias(j).abs();
        terms.lse[lse_at] = visible.clone().map(score_terms).fold(0.0, f64::max);
        let p: Vec<f64> = scores.iter().map(|s| (s - top).exp() / sum).collect();

        let factor = |j: usize| problem.factor(self.first_query / sizes.queries, query, j);
        for (j, p) in visible.clone().zip(&p) {
            add(
                &mut results.out[row.clone()],
                factor(j) * p,
                &problem.v[value(j)],
            );
            add_sizes(
                &mut terms.out[row.clone()],
                factor(j) * p,
                &problem.v[value(j)],
            );
        }
        let delta = dot(d_out, &results.out[row.clone()]);
        let delta_terms = dot_of_sizes(d_out, &terms.out[row.clone()]);
        for ((j, p), slope) in visible.zip(p).zip(slopes) {
            let (k, v) = (&problem.k[key(j)], &problem.v[value(j)]);
            let stayed = factor(j) * p;
            let d_score = p * (factor(j) * dot(d_out, v) - delta);
            let d_score_terms = p * (factor(j) * dot_of_sizes(d_out, v) + delta_terms);
            if let Some(bias) = &problem.bias {
                let place = bias.place([self.batch, self.head, query, j]);
                results.d_bias[place] += d_score;
                terms.d_bias[place] += d_score_terms.abs();
            }
            let ds = scale * slope * d_score;
            let ds_terms = (scale * slope).abs() * d_score_terms;
            add(&mut results.dv[value(j)], stayed, d_out);
            add(&mut results.dq[q_row.clone()], ds, k);
            add(&mut results.dk[key(j)], ds, q);
            add_sizes(&mut terms.dv[value(j)], stayed, d_out);
            add_sizes(&mut terms.dq[q_row.clone()], ds_terms, k);
            add_sizes(&mut terms.dk[key(j)], ds_terms, q);
        }
    }
}
