//! Admission control: sums kept up to date against sums made anew, and each part of the rule by hand.

use std::sync::Arc;

use leap::levers::admission::{AHEAD, Admission, KNOWN_LENGTHS, KvGrowth, RECOMPUTE_SHARE, Request};
use leap::remaining::{LengthDistribution, SurvivalFunction};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

fn certain(tokens: u32) -> Option<Arc<SurvivalFunction>> {
    Some(Arc::new(SurvivalFunction::certain(tokens)))
}

fn request(prompt: u32, length: Option<Arc<SurvivalFunction>>) -> Request {
    Request { prompt, cap: 100_000, shared_blocks: 0, length }
}

fn admission(blocks: u32) -> Admission {
    Admission::new(KvGrowth::plain(16), blocks, RECOMPUTE_SHARE).unwrap()
}

#[test]
fn a_request_comes_in_only_if_what_it_grows_into_fits_beside_the_others() {
    // 104 + 1,024 tokens ahead are 70.5 blocks and a half for the last; at 1,536 ahead both have ended.
    let one = || request(104, certain(1_200));
    for (blocks, fits) in [(142, true), (141, false)] {
        let mut room = admission(blocks);
        room.admitted(1, one());
        room.progressed(1, 0);
        assert_eq!(room.has_room(&one(), 0), fits, "{blocks} blocks");
    }
}

#[test]
fn one_that_will_have_ended_by_then_takes_no_room() {
    let mut room = admission(100);
    room.admitted(1, request(104, certain(1_200)));
    room.progressed(1, 0);
    // At 8 tokens ahead there are 7 + 64 blocks; where the resident holds 70 the other is long gone.
    assert!(room.has_room(&request(992, certain(20)), 0));
    assert!(!room.has_room(&request(992, certain(1_200)), 0));
}

#[test]
fn uncertain_lengths_leave_z_deviations_free() {
    // Each of two ends at 10 or at 1,000 tokens: at 512 ahead it is there with probability 1/2 and then holds
    // (104 + 512) / 16 + 1/2 = 39 blocks, so 39 in the mean and sqrt(2 x 1/4) x 39 = 27.6 in the deviation; at 8 and 16
    // ahead less.
    let either = LengthDistribution { lengths: vec![10.0, 1_000.0], weights: vec![0.5, 0.5] };
    let either = Some(Arc::new(SurvivalFunction::new(&either)));
    // At 768 ahead 55 blocks each: 55 + 38.9.
    for (blocks, fits) in [(94, true), (93, false)] {
        let mut room = admission(blocks);
        room.admitted(1, request(104, either.clone()));
        room.progressed(1, 0);
        assert_eq!(room.has_room(&request(104, either.clone()), 0), fits, "{blocks} blocks");
    }
}

#[test]
fn blocks_that_others_hold_are_not_its_own() {
    let mut room = admission(141);
    room.admitted(1, request(104, certain(1_200)));
    room.progressed(1, 0);
    let mut candidate = request(104, certain(1_200));
    assert!(!room.has_room(&candidate, 0));
    candidate.shared_blocks = 1;
    assert!(room.has_room(&candidate, 0));
}

#[test]
fn a_share_that_is_none_is_refused() {
    for share in [0.0, -0.1, 1.1, f64::NAN] {
        let refused = Admission::new(KvGrowth::plain(16), 10, share).unwrap_err();
        assert!(refused.to_string().starts_with("recompute_share: "), "{refused}");
    }
}

#[test]
fn a_window_bounds_what_a_group_grows_into() {
    // Two groups of 16-token blocks, one of which never holds more than 10: at 1,024 ahead 71 + 10 blocks each.
    let growth = KvGrowth::of_groups([(16, None), (16, Some(10))]);
    for (blocks, fits) in [(162, true), (161, false)] {
        let mut room = Admission::new(growth.clone(), blocks, RECOMPUTE_SHARE).unwrap();
        room.admitted(1, request(104, certain(1_200)));
        room.progressed(1, 0);
        assert_eq!(room.has_room(&request(104, certain(1_200)), 0), fits, "{blocks} blocks");
    }
}

#[test]
fn an_empty_engine_takes_anybody_and_so_does_one_that_knows_nothing() {
    let mut room = admission(1);
    assert!(room.has_room(&request(10_000, certain(10_000)), 0));
    room.admitted(1, request(104, None));
    room.progressed(1, 0);
    assert!(room.has_room(&request(10_000, None), 0));
    (1..KNOWN_LENGTHS).for_each(|_| room.finished(1_000));
    assert!(room.has_room(&request(10_000, None), 0));
    room.finished(1_000);
    room.progressed(1, 0);
    assert!(!room.has_room(&request(10_000, None), 0));
}

#[test]
fn z_rises_with_tokens_computed_again_and_falls_with_every_other_one() {
    // A KV cache of 16,000 tokens: z moves by 5 / 16,000 for each token computed again and by a hundredth of that for each
    // that is computed.
    let mut room = admission(1_000);
    assert!((room.z() - 1.0).abs() < 1e-6);
    room.stepped(1_600, 0, 1);
    assert!((room.z() - 0.995).abs() < 1e-6);
    room.stepped(0, 160, 1);
    assert!((room.z() - 1.045).abs() < 1e-6);
    room.stepped(0, 100_000, 1);
    assert!((room.z() - 5.0).abs() < 1e-6);
    room.stepped(160, 0, 1_000_000);
    assert!((room.z() + 3.0).abs() < 1e-6);
}

#[test]
fn equal_steps_at_once_are_those_steps_one_by_one() {
    let mut together = admission(1_000);
    let mut alone = admission(1_000);
    together.stepped(321, 1_000, 1);
    together.stepped(37, 0, 50);
    alone.stepped(321, 1_000, 1);
    (0..50).for_each(|_| alone.stepped(37, 0, 1));
    assert_eq!(together.z(), alone.z());
}

#[test]
fn a_prediction_is_compared_with_what_came() {
    let mut room = admission(10_000);
    room.admitted(1, request(104, certain(40)));
    room.progressed(1, 0);
    assert_eq!(room.peak_ratio(), None);
    room.has_room(&request(104, certain(40)), 0);
    // The most that is predicted is at 32 ahead: (104 + 32) / 16 + 1/2 = 9 blocks.
    room.stepped(1, 0, 32);
    room.progressed(1, 32);
    room.has_room(&request(104, certain(40)), 0);
    assert_eq!(room.peak_ratio(), Some(1.0));
    // With that look it was predicted anew: (136 + 8) / 16 + 1/2 at 8 ahead. Whoever is preempted shows that all there is was
    // not enough.
    room.preempted(1);
    assert_eq!(room.peak_ratio(), Some((9.0 + 10_000.0) / (9.0 + 9.5)));
}

/// What may happen to an engine.
#[derive(Clone, Debug)]
enum Event {
    Admitted { id: u64, prompt: u32, shared: u32, length: Option<u32> },
    Left(u64),
    Progressed { id: u64, by: u32 },
    Learned { id: u64, length: Option<u32> },
    Finished(u32),
}

fn event() -> impl Strategy<Value = Event> {
    let length = || prop::option::of(1..3_000_u32);
    prop_oneof![
        (0..12_u64, 1..2_000_u32, 0..5_u32, length()).prop_map(|(id, prompt, shared, length)| Event::Admitted {
            id,
            prompt,
            shared,
            length
        }),
        (0..12_u64).prop_map(Event::Left),
        (0..12_u64, 1..200_u32).prop_map(|(id, by)| Event::Progressed { id, by }),
        (0..12_u64, length()).prop_map(|(id, length)| Event::Learned { id, length }),
        (1..3_000_u32).prop_map(Event::Finished),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        rng_seed: RngSeed::Fixed(7),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn what_is_kept_up_to_date_is_what_would_be_made_anew(
        events in prop::collection::vec(event(), 1..200),
        candidate in (1..2_000_u32, 1..3_000_u32),
    ) {
        let candidate = request(candidate.0, certain(candidate.1));
        let mut kept: Vec<Admission> = (0..12).map(|i| admission(60 << i)).collect();
        let mut inside: Vec<(u64, Request, u32)> = Vec::new();
        let mut finished = Vec::new();
        for event in events {
            match event {
                Event::Admitted { id, prompt, shared, length } => {
                    let shared_blocks = shared.min(prompt / 16);
                    let request = Request { shared_blocks, ..request(prompt, length.and_then(certain)) };
                    kept.iter_mut().for_each(|room| room.admitted(id, request.clone()));
                    inside.retain(|one| one.0 != id);
                    inside.push((id, request, 0));
                }
                Event::Left(id) => {
                    kept.iter_mut().for_each(|room| room.left(id));
                    inside.retain(|one| one.0 != id);
                }
                Event::Progressed { id, by } => {
                    inside.iter_mut().filter(|one| one.0 == id).for_each(|one| one.2 += by);
                }
                Event::Learned { id, length } => {
                    kept.iter_mut().for_each(|room| room.learned(id, length.and_then(certain)));
                    inside.iter_mut().filter(|one| one.0 == id).for_each(|one| one.1.length = length.and_then(certain));
                }
                Event::Finished(tokens) => {
                    kept.iter_mut().for_each(|room| room.finished(tokens));
                    finished.push(tokens);
                }
            }
            for (i, room) in kept.iter_mut().enumerate() {
                inside.iter().for_each(|(id, _, generated)| room.progressed(*id, *generated));
                let mut anew = admission(60 << i);
                finished.iter().for_each(|&tokens| anew.finished(tokens));
                for (id, request, generated) in &inside {
                    anew.admitted(*id, request.clone());
                    anew.progressed(*id, *generated);
                }
                prop_assert_eq!(room.has_room(&candidate, 0), anew.has_room(&candidate, 0), "{} blocks", 60 << i);
            }
        }
    }

    #[test]
    fn survival_lies_between_the_points_about_it(
        points in prop::collection::btree_map(1..5_000_u32, 1..100_u32, 1..40),
        a in 0..5_000_u32,
        cap in 1..6_000_u32,
    ) {
        let lengths: Vec<f64> = points.keys().map(|&length| f64::from(length)).collect();
        let total: f64 = points.values().map(|&weight| f64::from(weight)).sum();
        let weights: Vec<f64> = points.values().map(|&weight| f64::from(weight) / total).collect();
        let above = |t: f64| lengths.iter().zip(&weights).filter(|(l, _)| **l > t).map(|(_, w)| w).sum::<f64>();
        let survival = SurvivalFunction::new(&LengthDistribution { lengths: lengths.clone(), weights: weights.clone() });
        let mut ahead = [0.0f32; AHEAD.len()];
        survival.ahead(a, cap, &AHEAD, &mut ahead);
        let now = survival.at(f64::from(a));
        let mut before = 1.0;
        for (&tau, &survives) in AHEAD.iter().zip(&ahead) {
            let t = f64::from(a + tau);
            let at = survival.at(t);
            // No more than what stands above the point before t, and no less than what stands above the one after it.
            let next = lengths.iter().copied().find(|&length| length > t).unwrap_or(t);
            prop_assert!(at <= above(t) + 1e-5 && at >= above(next) - 1e-5, "{at} at {t}");
            prop_assert!(survives <= before + 1e-6, "it rises at {tau}");
            before = survives;
            let expected = if a + tau >= cap || now <= 0.0 { 0.0 } else { at / now };
            prop_assert!((f64::from(survives) - expected).abs() < 1e-4, "{survives} instead of {expected}");
        }
    }
}
