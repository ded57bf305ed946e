//! Text features in the replayer: when what the encoder reads is known, what it changes, and what it teaches.

use std::collections::VecDeque;

use half::f16;
use leap::online::{OnlineOptions, OnlineReadout};
use leap::readout::{Kind, Meta, Parts, Readout, Target};
use leap::replay::{
    Arrivals, Control, CostModel, EngineConfig, Features, Goodput, Options, Outcome, Point, Readouts, RunInput, Trace,
    run, simulate, simulate_recorded,
};
use ndarray::Array2;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// What the prompt readout says of everybody, in tokens.
const GUESS: f32 = 50.0;
const STEP_S: f64 = 0.01;

/// Every step takes the same time, whatever is in it.
fn engine(max_num_seqs: u32) -> EngineConfig {
    let cost = CostModel {
        step_s: STEP_S,
        per_decode_seq_s: 0.0,
        per_kv_token_s: 0.0,
        per_token_over_free_s: 0.0,
        free_tokens: 0.0,
        per_prefill_pair_s: 0.0,
        per_kv_token_with_prefill_s: 0.0,
    };
    EngineConfig {
        cost,
        kv_tokens: 1 << 20,
        block_size: 16,
        max_num_seqs,
        max_num_batched_tokens: 8192,
        async_scheduling: false,
        enable_chunked_prefill: true,
        enable_prefix_caching: false,
        decode_slots: None,
        reserve_full_prompt: true,
        watermark: 0.0,
        max_model_len: None,
        data_parallel_size: 1,
    }
}

/// A readout that is this very layer on the roots of lengths.
fn readout(kind: Kind, weight: &[f32], bias: f32) -> OnlineReadout {
    let parts = Parts {
        mean: vec![0.0; weight.len()],
        scale: vec![1.0; weight.len()],
        weight: weight.to_vec(),
        bias,
        max_tokens: 1024,
        target: Target::Sqrt,
        lam: 1.0,
        clip: None,
        meta: Meta::new(kind),
        noise: None,
    };
    OnlineReadout::new(Readout::new(parts).unwrap(), None, OnlineOptions::default()).unwrap()
}

/// The prompt readout guesses, the text readout reads the root of the length from its first feature.
fn readouts() -> Readouts {
    let mut readouts = Readouts::default();
    readouts.put(Kind::Prompt, Some(readout(Kind::Prompt, &[0.0; 3], GUESS.sqrt())));
    readouts.put(Kind::Text, Some(readout(Kind::Text, &[1.0, 0.0, 0.0, 0.0], 0.0)));
    readouts
}

fn column(values: impl Iterator<Item = f32>) -> Features {
    let values: Vec<f32> = values.collect();
    Features::F32(Array2::from_shape_vec((values.len(), 1), values).unwrap())
}

/// Requests by arrival and length; their text tells the truth.
fn trace(requests: &[(f64, u32)]) -> Trace {
    Trace {
        arrival_s: requests.iter().map(|&(at, _)| at).collect(),
        prompt_tokens: vec![8; requests.len()],
        output_tokens: requests.iter().map(|&(_, output)| output).collect(),
        prefix_block_size: 16,
        text_features: Some(column(requests.iter().map(|&(_, output)| (output as f32).sqrt()))),
        ..Trace::default()
    }
}

fn options(policy: &str, engine: EngineConfig) -> Options {
    Options {
        policies: vec![policy.into()],
        points: vec![Point::default()],
        burstiness: 1.0,
        num_prompts: None,
        seed: 0,
        seeds: 1,
        max_concurrency: None,
        goodput: Goodput::default(),
        percentiles: vec![99.0],
        max_tokens: None,
        threads: Some(1),
        wait_cap_s: None,
        engine,
    }
}

fn replayed(trace: &Trace, readouts: &Readouts, engine: &EngineConfig, policy: &str) -> Outcome {
    simulate_recorded(trace, readouts, engine, policy, false, false).unwrap()
}

fn finishes(outcome: &Outcome) -> Vec<f64> {
    outcome.records.iter().map(|record| record.finish_s).collect()
}

fn predicted(outcome: &Outcome, kind: Kind) -> Vec<f32> {
    outcome.records.iter().map(|record| record.predicted[kind as usize]).collect()
}

/// By the key alone: the predicted length.
const PLAIN: &str = "leap:order=countdown,memory_weight=0,aging_rate=0,levers=queue,rls=off";

/// A single seat and the encoder, event by event: when each request ends.
fn naive(requests: &[(f64, u32)], encoder_s: f64) -> Option<Vec<f64>> {
    let mut finish = vec![f64::NAN; requests.len()];
    let mut known = vec![false; requests.len()];
    let (mut sent, mut waiting, mut unread) = (0, Vec::new(), VecDeque::new());
    let mut seat: Option<(f64, usize)> = None;
    let mut reading: Option<(f64, usize)> = None;
    let mut last = f64::NEG_INFINITY;
    loop {
        let arrival = requests.get(sent).map(|&(at, _)| at);
        let coming = [arrival, seat.map(|(at, _)| at), reading.map(|(at, _)| at)];
        let Some(now) = coming.into_iter().flatten().min_by(f64::total_cmp) else { return Some(finish) };
        if now > last && now - last < 1e-6 {
            // Too close for two ways of adding up to agree on which was first.
            return None;
        }
        last = now;
        while requests.get(sent).is_some_and(|&(at, _)| at <= now) {
            waiting.push(sent);
            unread.push_back(sent);
            sent += 1;
        }
        if let Some((at, id)) = reading
            && at <= now
        {
            known[id] = true;
            reading = None;
        }
        if reading.is_none()
            && let Some(id) = unread.pop_front()
        {
            reading = Some((now + encoder_s, id));
        }
        if let Some((at, id)) = seat
            && at <= now
        {
            finish[id] = at;
            unread.retain(|&other| other != id);
            seat = None;
        }
        if seat.is_none() {
            let length = |id: usize| if known[id] { requests[id].1 as f32 } else { GUESS };
            let first = waiting.iter().copied().min_by(|&x, &y| length(x).total_cmp(&length(y)).then(x.cmp(&y)));
            if let Some(id) = first {
                waiting.retain(|&other| other != id);
                seat = Some((now + STEP_S * f64::from(requests[id].1), id));
            }
        }
    }
}

fn requests() -> impl Strategy<Value = Vec<(f64, u32)>> {
    let gap = prop_oneof![2 => Just(0.0), 3 => 0.0..0.2_f64, 1 => 0.0..3.0_f64];
    // A length of the guess itself would be a tie that rounding decides.
    let length = prop_oneof![1 => 1..4_u32, 3 => 1..50_u32, 2 => 51..120_u32];
    prop::collection::vec((gap, length), 1..30).prop_map(|all| {
        let mut now = 0.0;
        let arrive = |(gap, length)| {
            now += gap;
            (now, length)
        };
        all.into_iter().map(arrive).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1_000,
        rng_seed: RngSeed::Fixed(20_242),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_prompt_orders_from_the_moment_at_which_it_is_read(requests in requests(), encoder_s in 0.001..0.7_f64) {
        let expected = naive(&requests, encoder_s);
        prop_assume!(expected.is_some());
        let policy = format!("{PLAIN},encoder_s={encoder_s}");
        let found = finishes(&replayed(&trace(&requests), &readouts(), &engine(1), &policy));
        for (id, (ours, theirs)) in found.iter().zip(expected.unwrap()).enumerate() {
            prop_assert!((ours - theirs).abs() < 1e-7, "request {} ends at {}, not {}", id, ours, theirs);
        }
    }
}

#[test]
fn the_row_is_the_text_then_the_prompt_features_or_else_the_length_terms() {
    let requests = [(0.0, 400), (0.0, 300)];
    let text = Array2::from_shape_vec((2, 2), vec![1.5_f32, 2.0, 3.5, -0.5]).unwrap();
    let before = Array2::from_shape_vec((2, 2), vec![0.25_f32, 4.0, -1.0, 6.0]).unwrap();
    let half = |rows: &Array2<f32>| Features::F16(rows.mapv(f16::from_f32));
    let mut made = trace(&requests);
    let policy = "leap:readouts=text,rls=off,encoder_s=0.001";
    let says = |made: &Trace, weight: &[f32]| {
        let mut readouts = Readouts::default();
        readouts.put(Kind::Text, Some(readout(Kind::Text, weight, 1.0)));
        predicted(&replayed(made, &readouts, &engine(2), policy), Kind::Text)
    };
    // Each of these numbers is exact in half precision, and so are their sums.
    for text in [half(&text), Features::F32(text.clone())] {
        made.text_features = Some(text);
        for before in [half(&before), Features::F32(before.clone())] {
            made.prompt_features = Some(before);
            let found = says(&made, &[1.0, 2.0, 4.0, 0.5]);
            let roots = [1.0 + 1.5 + 2.0 * 2.0 + 4.0 * 0.25 + 0.5 * 4.0, 1.0 + 3.5 - 2.0 * 0.5 - 4.0 + 0.5 * 6.0_f32];
            assert_eq!(found, roots.map(|root| root * root));
        }
        made.prompt_features = None;
        let n = 8.0_f64;
        for (terms, worth) in [([1.0, 0.0, 0.0], n.sqrt()), ([0.0, 1.0, 0.0], n.ln_1p()), ([0.0, 0.0, 1.0], n)] {
            let weight = [&[1.0, 2.0][..], &terms].concat();
            for (found, own) in says(&made, &weight).into_iter().zip([1.0 + 1.5 + 4.0, 1.0 + 3.5 - 1.0]) {
                assert!((f64::from(found).sqrt() - own - worth).abs() < 1e-5, "{found}: {own} + {worth}");
            }
        }
    }
}

/// Everybody at once, and a text that contradicts what the state says.
fn contradiction() -> (Trace, Readouts, EngineConfig) {
    let mut made = trace(&[(0.0, 100), (0.0, 20)]);
    made.features = made.text_features.replace(column([1.0, 22.0].into_iter()));
    let mut both = readouts();
    both.put(Kind::State, Some(readout(Kind::State, &[1.0], 0.0)));
    (made, both, EngineConfig { decode_slots: Some(1), ..engine(2) })
}

#[test]
fn what_the_state_has_said_stands() {
    let (made, both, engine) = contradiction();
    let finish = |readouts: &str| {
        let policy =
            format!("leap:order=countdown,aging_rate=0,levers=slots,rls=off,encoder_s=0.05,readouts={readouts}");
        finishes(&replayed(&made, &both, &engine, &policy))
    };
    let [long, short] = finish("prompt+text+state")[..] else { panic!("two requests") };
    assert!(short < long);
    assert_eq!(finish("prompt+state"), [long, short]);
    let [long, short] = finish("prompt+text")[..] else { panic!("two requests") };
    assert!(long < short, "the text alone has it the other way round");
}

#[test]
fn a_text_orders_residents_that_compete_for_a_slot() {
    let made = trace(&[(0.0, 100), (0.0, 20)]);
    let policy = "leap:readouts=text,order=countdown,aging_rate=0,levers=slots,rls=off,encoder_s=0.045";
    let found = finishes(&replayed(&made, &readouts(), &EngineConfig { decode_slots: Some(1), ..engine(2) }, policy));
    // Both have a token after the first step; the second is known at 0.09 and has 19 more to make.
    assert!((found[1] - (0.09 + 19.0 * STEP_S)).abs() < 1.5 * STEP_S, "{}", found[1]);
    assert!((found[0] - (100.0 + 19.0) * STEP_S).abs() < 1e-9, "{}", found[0]);
}

#[test]
fn admission_goes_by_what_the_text_says_of_residents() {
    // The second finds the memory taken by one who is known to be long, or, where nobody said so, about to be free.
    let made = trace(&[(0.0, 900), (6.0, 900)]);
    let small = EngineConfig { kv_tokens: 960, ..engine(2) };
    let admitted = |readouts_in_force: &str| {
        let policy = format!("leap:rls=off,encoder_s=0.5,readouts={readouts_in_force}");
        replayed(&made, &readouts(), &small, &policy).records[1].admitted_s
    };
    assert!(admitted("prompt+text") > 900.0 * STEP_S - 1e-6);
    assert!(admitted("prompt") < 6.0 + 2.0 * STEP_S);
}

#[test]
fn each_rank_has_an_encoder_of_its_own() {
    // The ranks take turns. Rank 0 reads its three by 3 s; one encoder for all would read the fifth request at 5 s.
    let made = trace(&[(0.0, 350), (0.0, 350), (0.0, 40), (0.0, 40), (0.0, 10), (0.0, 10)]);
    let two = EngineConfig { data_parallel_size: 2, ..engine(1) };
    let found = finishes(&replayed(&made, &readouts(), &two, &format!("{PLAIN},encoder_s=1")));
    assert!(found[4] < found[2] && found[5] < found[3], "{found:?}");
}

#[test]
fn a_row_that_comes_again_is_known_on_arrival() {
    let lengths = [90, 35, 75, 31, 60, 45, 80, 33];
    let mut all: Vec<(f64, u32)> = lengths.iter().map(|&length| (0.0, length)).collect();
    all.push((100.0, 34));
    let made = trace(&all);
    let rows: Vec<u32> = (0..made.len() as u32).collect();
    let input = RunInput::new(&made, &rows, 2 * made.len(), Arrivals::Recorded { speed: 1.0 }, 3, 0).unwrap();
    // Of the first pass all are read, but the first not before it has the seat.
    let policy = format!("{PLAIN},encoder_s=0.2");
    let options = options(&policy, engine(1));
    let spec = policy.parse().unwrap();
    let outcome = simulate(&made, &input, &options.engine, &spec, &readouts(), &options, &Control::default()).unwrap();
    let order = |from: usize| -> Vec<u32> {
        let mut pass: Vec<usize> = (from..from + 8).collect();
        pass.sort_by(|&x, &y| outcome.records[x].finish_s.total_cmp(&outcome.records[y].finish_s));
        pass.into_iter().map(|id| made.output_tokens[input.rows[id] as usize]).collect()
    };
    assert_eq!(order(0)[0], 90, "nobody is known at first, so the first comes first");
    let again = order(made.len());
    assert!(again.is_sorted(), "{again:?}");
}

/// A trace on which the text says everything and the prompt nothing; readouts learn from zero. With the text in one thread,
/// without it in two.
fn learned(policy: &str, text: bool) -> (leap::replay::Report, String) {
    let lengths: Vec<u32> = (0..600_u32).map(|i| 5 + (i * 7919 % 97) * (1 + i * 31 % 3)).collect();
    let requests: Vec<(f64, u32)> = lengths.iter().zip(0..).map(|(&length, i)| (0.2 * f64::from(i), length)).collect();
    let mut made = trace(&requests);
    if !text {
        made.text_features = None;
    }
    let asked = Options { seeds: 2, threads: Some(if text { 1 } else { 2 }), ..options(policy, engine(4)) };
    let (report, rows) = run(&made, &Readouts::default(), &asked, true, &Control::default()).unwrap();
    (report, format!("{:?}", rows.iter().map(|row| row.record).collect::<Vec<_>>()))
}

#[test]
fn what_is_read_teaches_and_what_is_skipped_does_not() {
    let spearman = |policy: &str| {
        let (report, _) = learned(policy, true);
        report.results[0].prediction.as_ref().unwrap().text.as_ref().unwrap().spearman.mean
    };
    assert!(spearman("leap").unwrap() > 0.9);
    // Whoever is read last has long finished: there is no row to learn from, and so no prediction.
    assert_eq!(spearman("leap:encoder_s=900"), None);
}

#[test]
fn a_request_that_ends_before_its_prompt_is_read_is_no_label() {
    let mut requests: Vec<(f64, u32)> = (0..16).map(|i| (f64::from(i), 2)).collect();
    requests.push((20.0, 100));
    let mut guess = Readouts::default();
    guess.put(Kind::Text, Some(readout(Kind::Text, &[0.0; 4], GUESS.sqrt())));
    let last = |encoder_s: f64| {
        let policy = format!("leap:readouts=text,batch=1,encoder_s={encoder_s}");
        predicted(&replayed(&trace(&requests), &guess, &engine(4), &policy), Kind::Text)[16]
    };
    assert_eq!(last(0.5), GUESS.sqrt() * GUESS.sqrt());
    assert!(last(0.001) < GUESS / 2.0, "{} after 16 labels of 2 tokens", last(0.001));
}

#[test]
fn without_its_readout_the_column_changes_nothing() {
    for readouts in ["prompt", "prompt+text"] {
        let policy = format!("leap:readouts={readouts},encoder_s=1e6");
        let (report, rows) = learned(&policy, true);
        let (plain, plain_rows) = learned("leap:readouts=prompt", false);
        assert_eq!(rows, plain_rows, "{readouts}");
        let metrics = |report: &leap::replay::Report| format!("{:?}", report.results[0].metrics);
        assert_eq!(metrics(&report), metrics(&plain), "{readouts}");
    }
    assert_ne!(learned("leap", true).1, learned("leap", false).1);
}

#[test]
fn notes_and_errors_name_what_is_missing() {
    let made = trace(&[(0.0, 10), (1.0, 20)]);
    let replay = |made: &Trace, readouts: &Readouts, policy: &str| {
        run(made, readouts, &options(policy, engine(4)), false, &Control::default())
    };
    let (report, _) = replay(&made, &Readouts::default(), "leap").unwrap();
    assert!(report.notes.contains(&"leap: the text readout learns from zero".to_owned()), "{:?}", report.notes);
    let plain = Trace { text_features: None, ..made.clone() };
    let (report, _) = replay(&plain, &Readouts::default(), "leap").unwrap();
    assert!(!report.notes.iter().any(|note| note.contains("text")), "{:?}", report.notes);
    assert!(report.policies[0].readouts.prompt && !report.policies[0].readouts.text);

    let fails = |made: &Trace, readouts: &Readouts, policy: &str| {
        replay(made, readouts, policy).map(drop).unwrap_err().to_string()
    };
    assert_eq!(
        fails(&plain, &Readouts::default(), "leap:readouts=prompt+text"),
        "policy leap:readouts=prompt+text: the trace has no column text_features"
    );
    let mut wide = Readouts::default();
    wide.put(Kind::Text, Some(readout(Kind::Text, &[1.0; 9], 0.0)));
    assert_eq!(
        fails(&made, &wide, "leap"),
        "column text_features has 4 features a row with those of the prompt, the readout reads 9"
    );
    let short = Trace { text_features: Some(column([1.0].into_iter())), ..made };
    assert_eq!(fails(&short, &Readouts::default(), "leap"), "column text_features has 1 rows, arrival_s has 2");
}
