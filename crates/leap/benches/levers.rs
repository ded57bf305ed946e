//! What a step asks of the levers with 1,024 residents: whether the first of the queue has room, after everybody has made
//! one token more, beside a plain sum over what each of them would hold at each of the tokens ahead; and the plan of the
//! slots lever where memory is short, beside a sort of the residents by their keys.

mod common;

use std::sync::Arc;

use common::side_by_side;
use criterion::{Criterion, criterion_group, criterion_main};
use leap::levers::admission::{AHEAD, Admission, KvGrowth, RECOMPUTE_SHARE, Request};
use leap::levers::{Active, Class, Planner, Rules};
use leap::noise::Noise;
use leap::remaining::SurvivalFunction;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const RESIDENTS: u64 = 1_024;
const BLOCK: u32 = 16;
/// Lengths and limits go up to here, so that nobody ends while it is measured.
const CAP: u32 = 1 << 20;

fn lengths(rng: &mut ChaCha8Rng) -> Arc<SurvivalFunction> {
    let score = rng.random_range(8.0..60.0f64);
    Arc::new(SurvivalFunction::new(&Noise::new(4_096).distribution(score, 4_096)))
}

fn admission(_: &mut Criterion) {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut room = Admission::new(KvGrowth::plain(BLOCK), 60_000, RECOMPUTE_SHARE).expect("a share");
    let mut prompts = Vec::new();
    for id in 0..RESIDENTS {
        let prompt = rng.random_range(1..2_000u32);
        let length = Some(lengths(&mut rng));
        room.admitted(id, Request { prompt, cap: CAP, shared_blocks: 0, length });
        prompts.push(prompt);
    }
    let candidate = Request { prompt: 500, cap: CAP, shared_blocks: 0, length: Some(lengths(&mut rng)) };
    let mut generated = 0;
    let check = || {
        // As long as answers are; then from the start again, which is as much work.
        generated = (generated + 1) % 2_048;
        room.all_progressed(|_| generated);
        room.has_room(&candidate, 0)
    };
    let held: Vec<[f32; AHEAD.len()]> =
        prompts.iter().map(|&prompt| AHEAD.map(|ahead| (prompt + ahead) as f32 / BLOCK as f32)).collect();
    let sum = || {
        let mut sums = [0.0f32; AHEAD.len()];
        for one in &held {
            sums.iter_mut().zip(one).for_each(|(sum, held)| *sum += held);
        }
        sums.iter().all(|&sum| sum <= 60_000.0)
    };
    side_by_side("admission, 1,024 residents", check, "a plain sum over them", sum);
}

fn plan(_: &mut Criterion) {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let residents: Vec<Active> = (0..RESIDENTS)
        .map(|number| Active {
            number,
            class: Class::Decoding,
            adapter: None,
            ln_remaining: rng.random_range(1.0..4_096.0f64).ln(),
            aged: number as f64 * 1e-3,
        })
        .collect();
    let mut planner = Planner::new(&Rules {
        slots: 512,
        step_tokens: 2_048,
        block_size: BLOCK as usize,
        groups: 1,
        max_adapters: None,
        hysteresis: 1.1,
        wait_cap_steps: Some(128),
    });
    let ours = || {
        assert!(planner.look(residents.len(), 0));
        let plan = planner.plan(&residents);
        let got: Vec<bool> = plan.contenders.iter().map(|i| !plan.gated.contains(i)).take(1).collect();
        planner.scheduled(&got);
        plan
    };
    let sort = || {
        let mut order: Vec<usize> = (0..residents.len()).collect();
        let key = |&i: &usize| residents[i].ln_remaining + residents[i].aged;
        order.sort_unstable_by(|a, b| key(a).total_cmp(&key(b)));
        order
    };
    side_by_side("plan, 1,024 residents, memory short", ours, "a sort by key", sort);
}

criterion_group! {
    name = benches;
    config = common::criterion();
    targets = admission, plan
}
criterion_main!(benches);
