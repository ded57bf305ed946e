//! The order of the running list and the plan of a step, by hand and against plain rules.

use leap::levers::{
    Active, Adapted, Class, Look, Part, Plan, Planner, Resident, Rules, Running, beyond, last_by_key, order,
};
use proptest::prelude::*;

const PARTS: [Part; 4] = [Part::Idle, Part::Decodes, Part::Prefills, Part::Gated];
/// Free blocks with which no step runs out.
const ROOM: usize = 1_000_000;

fn any_residents() -> impl Strategy<Value = Vec<Resident>> {
    let one = (0usize..4, -3i8..3, 0u64..1000, 0u64..1000);
    prop::collection::vec(one, 0..30).prop_map(|all| {
        let listed = |(i, (part, key, number, stands)): (u64, (usize, i8, u64, u64))| Resident {
            part: PARTS[part],
            key: f64::from(key),
            number: number * 32 + i,
            stands: stands * 32 + i,
        };
        (0..).zip(all).map(listed).collect()
    })
}

fn numbers(residents: &[Resident], order: &[u32]) -> Vec<u64> {
    order.iter().map(|&i| residents[i as usize].number).collect()
}

proptest! {
    #[test]
    fn parts_follow_each_other_and_each_has_its_order(residents in any_residents(), short: bool) {
        let of = |part: Part| {
            let mut these: Vec<Resident> = residents.iter().copied().filter(|r| r.part == part).collect();
            these.sort_by_key(|r| r.stands);
            these
        };
        let (idle, mut chosen, prefills, mut gated) =
            (of(Part::Idle), of(Part::Decodes), of(Part::Prefills), of(Part::Gated));
        if !gated.is_empty() {
            chosen.sort_by_key(|r| r.number);
        }
        gated.sort_by_key(|r| r.number);
        let mut tail = [prefills, gated].concat();
        if short {
            let by_key = |x: &Resident, y: &Resident| (x.key, x.number).partial_cmp(&(y.key, y.number)).unwrap();
            chosen.sort_by(by_key);
            tail.sort_by(by_key);
        }
        let expected: Vec<u64> = [idle, chosen, tail].concat().iter().map(|r| r.number).collect();
        prop_assert_eq!(numbers(&residents, &order(&residents, short)), expected);
    }

    #[test]
    fn who_stands_last_is_the_last_of_the_order(residents in any_residents()) {
        let expected = numbers(&residents, &order(&residents, true)).last().copied();
        let key = |number: u64| residents.iter().find(|r| r.number == number).unwrap().key;
        let unkeyed = residents.iter().map(|&r| Resident { key: f64::NAN, ..r });
        prop_assert_eq!(last_by_key(unkeyed, key), expected);
    }

    #[test]
    fn adapters_beyond_are_those_of_the_worst(
        residents in prop::collection::vec((prop::option::of(0u64..5), -3i8..3, 0u32..4), 0..20),
        most in 1usize..4,
    ) {
        let adapted = |(i, &(adapter, key, overdue)): (usize, &(Option<u64>, i8, u32))| Adapted {
            adapter, key: f64::from(key), number: i as u64, overdue,
        };
        let all: Vec<Adapted> = residents.iter().enumerate().map(adapted).collect();
        let mut sorted: Vec<usize> = (0..all.len()).collect();
        sorted.sort_by(|&x, &y| {
            let place = |i: usize| (-f64::from(all[i].overdue), all[i].key, i as f64);
            place(x).partial_cmp(&place(y)).unwrap()
        });
        let mut kept: Vec<u64> = Vec::new();
        for i in sorted {
            kept.extend(all[i].adapter.filter(|a| !kept.contains(a)));
        }
        kept.truncate(most);
        let expected: Vec<usize> =
            (0..all.len()).filter(|&i| all[i].adapter.is_some_and(|a| !kept.contains(&a))).collect();
        let mut found = beyond(&all, most);
        found.sort_unstable();
        prop_assert_eq!(found, expected);
    }

    /// In a pipeline everybody has a step of its own turn: who holds a slot keeps it there against those hardly better.
    #[test]
    fn turns_of_a_pipeline_do_not_take_slots_from_each_other(
        lengths in prop::collection::vec(prop::collection::vec(100.0..149.0f64, 12), 18), n in 4usize..12, ranks in 2usize..4,
    ) {
        let mut planner = Planner::new(&Rules { hysteresis: 1.5, ..rules() });
        // Nobody is shorter than another by the factor, so that the first to have the slot of a turn keep it.
        let mut last: Vec<Option<usize>> = vec![None; n];
        let mut holders = vec![None; ranks];
        for (step, lengths) in lengths.iter().enumerate() {
            let class = |at: Option<usize>| if at.is_some_and(|at| step < at + ranks) { Class::Idle } else { Class::Decoding };
            let residents: Vec<Active> =
                (0..).zip(lengths).zip(&last).map(|((i, &length), &at)| active(i, class(at), length)).collect();
            let Some(plan) = plan(&mut planner, &residents, ROOM) else { break };
            run(&mut planner, &plan);
            let chosen: Vec<usize> = (0..n)
                .filter(|&i| residents[i].class == Class::Decoding && !plan.gated.contains(&(i as u32)))
                .collect();
            prop_assert_eq!(chosen.len(), 1);
            last[chosen[0]] = Some(step);
            let holder = holders[step % ranks].get_or_insert(chosen[0]);
            prop_assert_eq!(*holder, chosen[0]);
        }
    }

    #[test]
    fn nobody_waits_longer_than_the_cap_and_one_round(
        lengths in prop::collection::vec(1.0..1000.0f64, 2..12), slots in 1usize..5, cap in 1u32..11,
    ) {
        let n = lengths.len();
        let mut planner = Planner::new(&Rules { slots, wait_cap_steps: Some(cap), ..rules() });
        let residents = decoding(&lengths);
        let (mut waited, mut promoted) = (vec![0u32; n], 0);
        for _ in 0..100 {
            let Some(plan) = plan(&mut planner, &residents, ROOM) else {
                prop_assert!(n <= slots);
                break;
            };
            prop_assert_eq!(n - plan.gated.len(), slots.min(n));
            promoted += plan.promoted;
            run(&mut planner, &plan);
            for (i, steps) in waited.iter_mut().enumerate() {
                *steps = if plan.gated.contains(&(i as u32)) { *steps + 1 } else { 0 };
                prop_assert!(*steps <= cap + n.div_ceil(slots) as u32);
            }
        }
        prop_assert_eq!(promoted > 0, n > slots);
    }
}

fn rules() -> Rules {
    Rules {
        slots: 1,
        step_tokens: 40,
        block_size: 16,
        groups: 2,
        max_adapters: None,
        hysteresis: 1.0,
        wait_cap_steps: None,
    }
}

fn active(number: u64, class: Class, remaining: f64) -> Active {
    Active { number, class, adapter: None, ln_remaining: remaining.ln(), aged: 0.0 }
}

fn decoding(lengths: &[f64]) -> Vec<Active> {
    (0..).zip(lengths).map(|(number, &length)| active(number, Class::Decoding, length)).collect()
}

fn plan(planner: &mut Planner, residents: &[Active], free_blocks: usize) -> Option<Plan> {
    planner.look(residents.len(), free_blocks).then(|| planner.plan(residents))
}

/// Everybody but those passed over gets a token.
fn run(planner: &mut Planner, plan: &Plan) {
    let got: Vec<bool> = plan.contenders.iter().map(|i| !plan.gated.contains(i)).collect();
    planner.scheduled(&got);
}

#[test]
fn memory_is_short_below_what_a_step_can_take() {
    // Two for each resident, three for 40 tokens, in each of two caches.
    let mut running = Running::new(8, 40, 16, 2);
    assert!(!running.memory_is_short(5, 26) && running.memory_is_short(5, 25));
    assert_eq!(running.look(5, 26, false), Look::Leave);
    assert_eq!(running.look(5, 25, false), Look::ArrangeByKey);
    // Once arranged, prefills may stand before requests that decode.
    assert_eq!(running.look(5, 26, false), Look::Arrange);
    assert_eq!(running.look(5, 26, false), Look::Leave);
    assert_eq!(running.look(9, ROOM, false), Look::Arrange);
    assert_eq!(running.look(9, ROOM, false), Look::Arrange);
    let mut bound = Running::new(8, 40, 16, 1);
    assert_eq!(bound.look(1, ROOM, true), Look::Arrange);
}

#[test]
fn the_shortest_decode_and_the_longest_is_the_victim() {
    let mut residents = decoding(&[50.0, 10.0, 40.0, 20.0, 30.0]);
    residents.push(active(5, Class::Prefilling, 35.0));
    residents.push(active(6, Class::Idle, 900.0));
    let mut planner = Planner::new(&Rules { slots: 2, ..rules() });
    let plan = plan(&mut planner, &residents, 0).unwrap();
    assert_eq!(plan.order, [6, 1, 3, 4, 5, 2, 0]);
    assert_eq!((plan.gated, plan.contenders), (vec![0, 2, 4], vec![0, 1, 2, 3, 4]));
}

#[test]
fn keys_are_wanted_where_something_binds() {
    let mut planner = Planner::new(&Rules { slots: 2, max_adapters: Some(1), ..rules() });
    let mut residents = decoding(&[5.0, 4.0]);
    residents.push(active(2, Class::Prefilling, 1.0));
    assert!(planner.look(3, ROOM) && !planner.wants_keys(&residents));
    assert!(planner.look(3, 0) && planner.wants_keys(&residents));
    residents[2].class = Class::Decoding;
    assert!(planner.look(3, ROOM) && planner.wants_keys(&residents));
    residents.truncate(2);
    assert!(planner.look(2, ROOM) && !planner.wants_keys(&residents));
    (residents[0].adapter, residents[1].adapter) = (Some(1), Some(2));
    assert!(planner.look(2, ROOM) && planner.wants_keys(&residents));
    residents[1].class = Class::Idle;
    assert!(!planner.wants_keys(&residents));
}

#[test]
fn a_holder_keeps_its_slot_until_another_is_shorter_by_the_factor() {
    let mut planner = Planner::new(&Rules { hysteresis: 1.5, ..rules() });
    let first = plan(&mut planner, &decoding(&[100.0, 101.0]), ROOM).unwrap();
    assert_eq!(first.gated, [1]);
    run(&mut planner, &first);
    // 100 / 1.5 = 66.7.
    for (length, gated) in [(90.0, 1), (67.0, 1), (66.0, 0)] {
        assert_eq!(plan(&mut planner.clone(), &decoding(&[100.0, length]), ROOM).unwrap().gated, [gated]);
    }
    // Once nobody was without a slot, nobody holds one against another.
    plan(&mut planner, &decoding(&[100.0]), 0).map(|plan| run(&mut planner, &plan)).unwrap();
    assert_eq!(plan(&mut planner, &decoding(&[100.0, 90.0]), ROOM).unwrap().gated, [0]);
}

#[test]
fn a_holder_that_is_idle_meanwhile_is_still_one_when_it_comes_back() {
    let mut planner = Planner::new(&Rules { hysteresis: 1.5, ..rules() });
    let mut step = |first: Class, lengths: [f64; 2]| {
        let residents = [active(0, first, lengths[0]), active(1, Class::Decoding, lengths[1])];
        let plan = plan(&mut planner, &residents, ROOM).unwrap();
        run(&mut planner, &plan);
        plan.gated
    };
    assert_eq!(step(Class::Decoding, [100.0, 120.0]), [1]);
    // Its token is on its way for two steps, in which the other one has the slot that nobody else wants.
    assert_eq!(step(Class::Idle, [100.0, 90.0]), [0; 0]);
    assert_eq!(step(Class::Idle, [100.0, 90.0]), [0; 0]);
    assert_eq!(step(Class::Decoding, [100.0, 90.0]), [1]);
    assert_eq!(step(Class::Idle, [100.0, 90.0]), [0; 0]);
    // 100 / 1.5 = 66.7; and 60 / 1.5 = 40.
    assert_eq!(step(Class::Decoding, [100.0, 66.0]), [0]);
    assert_eq!(step(Class::Decoding, [50.0, 60.0]), [0]);
}

#[test]
fn aging_is_worth_its_foldings() {
    // ln 40 - ln 10 = 1.386.
    for (aged, gated) in [(1.38, 0), (1.39, 1)] {
        let mut residents = decoding(&[40.0, 10.0]);
        residents[1].aged = aged;
        let mut planner = Planner::new(&rules());
        assert_eq!(plan(&mut planner, &residents, ROOM).unwrap().gated, [gated]);
    }
}

#[test]
fn of_equal_keys_the_first_to_arrive_decodes() {
    let mut residents = decoding(&[20.0; 3]);
    residents.reverse();
    assert_eq!(plan(&mut Planner::new(&rules()), &residents, ROOM).unwrap().gated, [0, 1]);
}

#[test]
fn residents_of_more_adapters_than_fit_are_passed_over_and_count_as_waiting() {
    let mut residents = decoding(&[10.0, 20.0, 30.0]);
    residents.push(active(3, Class::Prefilling, 40.0));
    for (resident, adapter) in residents.iter_mut().zip([Some(7), None, Some(8), Some(8)]) {
        resident.adapter = adapter;
    }
    let limits = Rules { slots: 8, max_adapters: Some(1), wait_cap_steps: Some(2), ..rules() };
    let mut planner = Planner::new(&limits);
    for _ in 0..2 {
        let plan = plan(&mut planner, &residents, ROOM).unwrap();
        assert_eq!((&plan.gated[..], &plan.contenders[..]), (&[2, 3][..], &[0, 1, 2, 3][..]));
        run(&mut planner, &plan);
    }
    // By now those of adapter 8 are overdue.
    assert_eq!(plan(&mut planner, &residents, ROOM).unwrap().gated, [0]);
    assert_eq!(planner.settle(&residents), [2, 3]);
}
