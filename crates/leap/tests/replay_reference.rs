//! The replayer against a second, naive engine model, over random small scenarios.

mod reference;

use leap::replay::{
    Arrivals, Control, CostModel, EngineConfig, Goodput, Options, Point, PolicySpec, Readouts, RunInput, Trace,
    left_out, simulate,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use reference::Reference;

/// One engine, one policy, a few requests.
#[derive(Clone, Debug)]
struct Scenario {
    /// (gap to the arrival before in seconds, prompt, output, score, prefix family, shared blocks)
    requests: Vec<(f64, u32, u32, f32, u64, usize)>,
    engine: EngineConfig,
    policy: String,
    wait_cap_s: Option<f64>,
    max_concurrency: Option<u32>,
}

const COST: CostModel = CostModel {
    step_s: 0.00669,
    per_decode_seq_s: 5.13e-5,
    per_kv_token_s: 1.231e-6,
    per_token_over_free_s: 1.711e-5,
    free_tokens: 24.0,
    per_prefill_pair_s: 9.93e-9,
    per_kv_token_with_prefill_s: 3.37e-7,
};

fn gap() -> impl Strategy<Value = f64> {
    prop_oneof![4 => Just(0.0), 4 => 0.0..0.02_f64, 3 => 0.0..0.3_f64, 1 => 1.0..8.0_f64]
}

fn requests() -> impl Strategy<Value = Vec<(f64, u32, u32, f32, u64, usize)>> {
    let prompt = prop_oneof![3 => 1..40_u32, 2 => 1..200_u32, 1 => 1..600_u32];
    let output = prop_oneof![1 => Just(1_u32), 3 => 1..12_u32, 3 => 1..80_u32];
    prop::collection::vec((gap(), prompt, output, 0.5..90_f32, 0..3_u64, 0..20_usize), 1..28)
}

fn engine() -> impl Strategy<Value = EngineConfig> {
    let memory = prop_oneof![3 => 40..200_u32, 2 => 200..700_u32, 1 => 700..3000_u32];
    let limits = (memory, prop::sample::select(vec![4_u32, 16]), 1..13_u32, 16..257_u32);
    let watermark = prop_oneof![3 => Just(0.0), 1 => 0.0..0.2_f64];
    let flags = (any::<bool>(), prop::bool::weighted(0.75), any::<bool>(), any::<bool>(), watermark);
    (limits, flags, prop::option::of(1..8_u32)).prop_map(|(limits, flags, decode_slots)| {
        let (kv_tokens, block_size, max_num_seqs, max_num_batched_tokens) = limits;
        let (async_scheduling, enable_chunked_prefill, enable_prefix_caching, reserve_full_prompt, watermark) = flags;
        EngineConfig {
            cost: COST,
            kv_tokens: kv_tokens.max(block_size),
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            async_scheduling,
            enable_chunked_prefill,
            enable_prefix_caching,
            decode_slots,
            reserve_full_prompt,
            watermark,
            max_model_len: None,
            data_parallel_size: 1,
        }
    })
}

fn policy() -> impl Strategy<Value = String> {
    let cap =
        prop_oneof![2 => Just(String::new()), 1 => (1..40_u32).prop_map(|steps| format!("wait_cap_steps={steps}"))];
    let plain = prop::sample::select(vec![
        "fcfs",
        "sjf-prompt",
        "sjf-prompt:aging_rate=2",
        "sjf-prompt:levers=queue+slots",
        "sjf-prompt:aging=2",
        "sjf-prompt:levers=queue+admission,aging=3",
        "fcfs:levers=admission",
        "hrrn:levers=admission",
        "srpt-oracle:levers=queue+slots+admission,aging=1",
        "sjf-oracle:levers=queue+admission",
        "score:x:levers=queue+slots+admission,aging=2",
        "srpt-oracle:levers=queue+evict+admission,evict_per_s=5",
        "las:levers=queue+slots+admission,aging=2",
        "hrrn",
        "las",
        "las:levers=slots,aging_rate=0",
        "mlfq",
        "mlfq:aging_rate=0",
        "sjf-oracle",
        "sjf-oracle:memory_weight=0",
        "srpt-oracle",
        "srpt-oracle:aging_rate=1.5",
        "srpt-oracle:levers=slots",
        "score:x",
        "score:x:levers=queue+slots",
        "score:x:levers=slots,hysteresis=1.3,aging_rate=0",
        "score:x:levers=queue+slots,delay_s=0.0473,gpu_share=0.21",
        "score:x:delay_s=0.313,gpu_share=0.1",
        "score:x:levers=queue+slots,delay_s=0.0881",
        "score:x:levers=queue+evict,evict_per_s=3.1",
        "srpt-oracle:levers=queue+slots+evict",
        "srpt-oracle:levers=queue+evict,evict_per_s=11,evict_factor=1",
        "srpt-oracle:levers=slots+evict,evict_per_s=17",
        "las:levers=queue+evict,evict_per_s=7.3",
    ]);
    (plain, cap).prop_map(|(plain, cap)| {
        let is_plain = !plain.trim_start_matches("score:").contains(':');
        match (cap.is_empty(), is_plain) {
            (true, _) => plain.to_owned(),
            (false, true) => format!("{plain}:{cap}"),
            (false, false) => format!("{plain},{cap}"),
        }
    })
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let wait_cap_s = prop_oneof![3 => Just(None), 1 => (0.0..0.5_f64).prop_map(Some)];
    (requests(), engine(), policy(), wait_cap_s, prop::option::weighted(0.25, 1..12_u32)).prop_map(
        |(requests, engine, policy, wait_cap_s, max_concurrency)| Scenario {
            requests,
            engine,
            policy,
            wait_cap_s,
            max_concurrency,
        },
    )
}

impl Scenario {
    fn trace(&self) -> Trace {
        let mut trace = Trace { prefix_block_size: 16, ..Trace::default() };
        let (mut now, mut scores, mut prefixes) = (0.0, Vec::new(), Vec::new());
        for (index, &(gap, prompt, output, score, family, shared)) in self.requests.iter().enumerate() {
            now += gap;
            trace.arrival_s.push(now);
            trace.prompt_tokens.push(prompt);
            trace.output_tokens.push(output);
            scores.push(score);
            let hash = |block: usize| {
                if block < shared { 1_000 * family + block as u64 } else { (index * 1_000 + block) as u64 + 1_000_000 }
            };
            prefixes.push((0..prompt as usize / 16).map(hash).collect());
        }
        trace.scores.push(("x".into(), scores));
        trace.prefix_blocks = Some(prefixes);
        trace
    }

    fn options(&self) -> Options {
        Options {
            policies: vec![self.policy.clone()],
            points: vec![Point::default()],
            burstiness: 1.0,
            num_prompts: None,
            seed: 0,
            seeds: 1,
            max_concurrency: self.max_concurrency,
            goodput: Goodput::default(),
            percentiles: vec![99.0],
            max_tokens: None,
            threads: Some(1),
            wait_cap_s: self.wait_cap_s,
            engine: self.engine.clone(),
        }
    }
}

fn close(ours: f64, theirs: f64) -> bool {
    (ours - theirs).abs() <= 1e-9 * ours.abs().max(theirs.abs()).max(1e-3)
}

fn compare(scenario: &Scenario) -> Result<(), TestCaseError> {
    let trace = scenario.trace();
    let options = scenario.options();
    let config = &scenario.engine;
    let spec: PolicySpec = scenario.policy.parse().unwrap();
    prop_assume!(config.check().is_ok());
    let out: Vec<u32> = left_out(&trace, config).into_iter().map(|(row, _)| row).collect();
    let rows: Vec<u32> = (0..trace.len() as u32).filter(|row| !out.contains(row)).collect();
    prop_assume!(!rows.is_empty());
    let input = RunInput::new(&trace, &rows, rows.len(), Arrivals::Recorded { speed: 1.0 }, 0, 0).unwrap();
    let mut reference = Reference::new(&trace, &input, config, &spec, &options);
    reference.run();
    prop_assume!(!reference.room.close);
    let outcome = simulate(&trace, &input, config, &spec, &Readouts::default(), &options, &Control::default()).unwrap();
    for (index, (record, expected)) in outcome.records.iter().zip(&reference.requests).enumerate() {
        prop_assert!(
            close(record.first_token_s, expected.first_token_s),
            "request {index}: first token at {}, reference {}",
            record.first_token_s,
            expected.first_token_s
        );
        prop_assert!(
            close(record.finish_s, expected.finish_s),
            "request {index}: ends at {}, reference {}",
            record.finish_s,
            expected.finish_s
        );
        prop_assert_eq!(record.preemptions, expected.preemptions, "preemptions of request {}", index);
    }
    prop_assert_eq!(outcome.records.len(), reference.requests.len());
    prop_assert_eq!(outcome.steps, reference.steps, "steps");
    prop_assert_eq!(outcome.steps_with_queue, reference.steps_with_queue, "steps with a queue");
    prop_assert_eq!(outcome.steps_blocked_by_memory, reference.steps_blocked_by_memory, "steps blocked by memory");
    prop_assert_eq!(outcome.steps_blocked_by_seats, reference.steps_blocked_by_seats, "steps blocked by seats");
    prop_assert_eq!(outcome.computed_tokens, reference.computed_tokens, "tokens computed");
    prop_assert_eq!(outcome.cached_tokens, reference.cached_tokens, "cached tokens");
    prop_assert_eq!(outcome.preemptions, reference.preemptions, "preemptions");
    prop_assert_eq!(outcome.recomputed_tokens, reference.recomputed_tokens, "tokens computed again");
    if spec.levers.admission {
        prop_assert_eq!(outcome.admission_holds, reference.room.holds, "steps in which the first was held back");
    }
    prop_assert_eq!(outcome.wait_cap_promotions, reference.promotions, "promotions");
    prop_assert!(
        close(outcome.waited_s, reference.waited_s),
        "waited {}, reference {}",
        outcome.waited_s,
        reference.waited_s
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3_000,
        rng_seed: RngSeed::Fixed(20_240),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn replay_agrees_with_the_naive_engine(scenario in scenario()) {
        compare(&scenario)?;
    }
}

/// More requests than finished ones have to be known before they say anything, on an engine that is always short.
fn crowd() -> impl Strategy<Value = Scenario> {
    let policy = prop::sample::select(vec![
        "fcfs:levers=admission",
        "sjf-prompt:levers=queue+admission,aging=3",
        "score:x:levers=queue+slots+admission,aging=2",
        "srpt-oracle:levers=queue+slots+admission,aging=1",
    ]);
    let request = (0.0..0.1_f64, 1..100_u32, 1..90_u32, 0.5..90_f32, 0..3_u64, 0..8_usize);
    let requests = prop::collection::vec(request, 40..70);
    (requests, engine(), 200..600_u32, policy).prop_map(|(requests, engine, kv_tokens, policy)| Scenario {
        requests,
        engine: EngineConfig { kv_tokens, ..engine },
        policy: policy.into(),
        wait_cap_s: None,
        max_concurrency: None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        rng_seed: RngSeed::Fixed(20_241),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_crowd_is_admitted_as_by_the_naive_engine(scenario in crowd()) {
        compare(&scenario)?;
    }
}

/// Small engine of one policy, chunked prefill and 4-token blocks, that scenarios change where they need to.
fn small(policy: &str, kv_tokens: u32, max_num_seqs: u32, max_num_batched_tokens: u32) -> Scenario {
    let engine = EngineConfig {
        cost: COST,
        kv_tokens,
        block_size: 4,
        max_num_seqs,
        max_num_batched_tokens,
        async_scheduling: false,
        enable_chunked_prefill: true,
        enable_prefix_caching: false,
        decode_slots: None,
        reserve_full_prompt: false,
        watermark: 0.0,
        max_model_len: None,
        data_parallel_size: 1,
    };
    Scenario { requests: Vec::new(), engine, policy: policy.into(), wait_cap_s: None, max_concurrency: None }
}

fn assert_agrees(scenario: &Scenario) {
    if let Err(error) = compare(scenario) {
        panic!("{error}");
    }
}

#[test]
fn a_prefix_block_numbered_0_is_not_that_numbered_1() {
    let mut scenario = small("fcfs", 40, 1, 16);
    scenario.engine.enable_prefix_caching = true;
    scenario.requests = vec![(0.0, 16, 1, 1.0, 0, 1), (0.0, 32, 1, 1.0, 0, 2)];
    assert_agrees(&scenario);
}

#[test]
fn the_only_decoder_may_preempt_itself() {
    let mut scenario = small("las", 144, 2, 16);
    scenario.engine.decode_slots = Some(1);
    scenario.requests = vec![(0.0, 34, 64, 1.0, 0, 0), (0.0, 5, 46, 1.0, 0, 0)];
    assert_agrees(&scenario);
}

#[test]
fn a_request_is_not_evicted_in_the_step_that_prefills_it() {
    // The first waits past the cap and is admitted before the second, whose key is far better.
    let mut scenario = small("srpt-oracle:levers=queue+evict,evict_per_s=1000000", 80, 1, 64);
    scenario.wait_cap_s = Some(0.0);
    scenario.requests = vec![(0.0, 8, 60, 1.0, 0, 0), (0.001, 8, 2, 1.0, 0, 0), (0.0, 8, 1, 1.0, 0, 0)];
    assert_agrees(&scenario);
    scenario.engine.max_num_seqs = 4;
    scenario.engine.kv_tokens = 72;
    assert_agrees(&scenario);
}

#[test]
fn a_delayed_score_orders_the_slots_when_every_seat_is_taken() {
    let mut scenario = small("score:x:levers=queue+slots,delay_s=0.05", 400, 2, 64);
    scenario.engine.decode_slots = Some(1);
    scenario.requests = vec![(0.0, 8, 40, 70.0, 0, 0), (0.0, 8, 40, 1.0, 0, 0), (0.0, 8, 1, 1.0, 0, 0)];
    assert_agrees(&scenario);
}

#[test]
fn a_limit_that_never_binds_changes_nothing() {
    let mut scenario = small("sjf-prompt", 400, 1, 64);
    scenario.wait_cap_s = Some(0.05);
    scenario.max_concurrency = Some(50);
    scenario.requests = (0..12).map(|i| (0.0137, 20 + 7 * (i * 5 % 12), 5, 1.0, 0, 0)).collect();
    assert_agrees(&scenario);
}
