//! Who gives way to a better request that waits, against a search through every number of victims.

use leap::levers::{Candidate, Claim, Evictor};
use proptest::prelude::*;

fn claim(key: f64, blocks: usize) -> Claim {
    Claim { key, blocks, seat: false }
}

/// Victims among residents of `(key, blocks)`, in the order of arrival.
fn victims(evictor: &mut Evictor, claim: Claim, residents: &[(f64, usize)], free: usize, now_s: f64) -> Vec<usize> {
    let number = |(i, &(key, _)): (usize, &(f64, usize))| Candidate { key, number: i as u64 };
    let candidates: Vec<Candidate> = residents.iter().enumerate().map(number).collect();
    evictor.victims(&claim, &candidates, |i| residents[i].1, free, now_s)
}

proptest! {
    #[test]
    fn as_few_of_the_worst_as_make_room(
        residents in prop::collection::vec((-3i8..4, 0usize..5, 0u64..1000), 0..12),
        (key, blocks, seat, free) in (-3i8..4, 0usize..16, any::<bool>(), 0usize..8),
        factor in prop_oneof![Just(1.0f64), Just(2.0)],
    ) {
        let mut order: Vec<(f64, u64, usize, usize)> = residents
            .iter()
            .enumerate()
            // Numbers differ, and are not those of the places in the list.
            .map(|(i, &(key, blocks, number))| (f64::from(key), number * 16 + i as u64, blocks, i))
            .collect();
        let candidates: Vec<Candidate> = order.iter().map(|r| Candidate { key: r.0, number: r.1 }).collect();
        order.retain(|r| r.0 - factor.ln() > f64::from(key));
        order.sort_by(|x, y| y.partial_cmp(x).unwrap());
        let room = |n: usize| {
            let freed: usize = order[..n].iter().map(|r| r.2).sum();
            free + freed >= blocks && (n > 0 || !seat)
        };
        let count = (0..=order.len()).find(|&n| room(n)).unwrap_or(0);
        let expected: Vec<usize> = order[..count].iter().map(|r| r.3).collect();
        let mut evictor = Evictor::new(factor, 1.0);
        let claim = Claim { key: f64::from(key), blocks, seat };
        let found = evictor.victims(&claim, &candidates, |i| residents[i].1, free, 0.0);
        prop_assert_eq!(evictor.evicted(), found.len() as u64);
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn only_as_many_as_make_room_the_worst_first() {
    let residents = [(5.0, 4), (9.0, 4), (7.0, 4), (2.0, 4)];
    assert_eq!(victims(&mut Evictor::new(2.0, 1.0), claim(1.0, 6), &residents, 0, 0.0), [1, 2]);
}

#[test]
fn a_seat_takes_one_even_where_memory_is_free() {
    let seat = Claim { seat: true, ..claim(1.0, 6) };
    assert_eq!(victims(&mut Evictor::new(2.0, 1.0), seat, &[(5.0, 1), (6.0, 1)], 100, 0.0), [1]);
    assert!(victims(&mut Evictor::new(2.0, 1.0), claim(1.0, 6), &[(5.0, 1)], 100, 0.0).is_empty());
}

#[test]
fn only_who_is_worse_by_the_factor() {
    for (factor, count) in [(1.0, 1), (2.0, 1), (2.1, 0)] {
        let claim = claim(10f64.ln(), 8);
        assert_eq!(victims(&mut Evictor::new(factor, 1.0), claim, &[(20.001f64.ln(), 8)], 0, 0.0).len(), count);
    }
    assert!(victims(&mut Evictor::new(2.0, 1.0), claim(0.0, 1), &[(f64::NAN, 8)], 0, 0.0).is_empty());
}

#[test]
fn nobody_where_it_would_not_be_enough_nor_in_the_next_moment() {
    let mut evictor = Evictor::new(2.0, 1.0);
    assert!(victims(&mut evictor, claim(0.0, 10), &[(5.0, 4), (6.0, 4)], 1, 0.0).is_empty());
    assert_eq!(evictor.evicted(), 0);
    assert!(!evictor.ready(0.01) && evictor.ready(1.0));
}

#[test]
fn no_more_than_the_rate() {
    let mut evictor = Evictor::new(2.0, 0.5);
    let residents: Vec<(f64, usize)> = (0..10).map(|i| (f64::from(i) + 5.0, 1)).collect();
    assert_eq!(evictor.next_s(10.0), None);
    assert_eq!(victims(&mut evictor, claim(0.0, 3), &residents, 0, 10.0).len(), 3);
    // Three at one in two seconds.
    assert_eq!((evictor.next_s(15.9), evictor.next_s(16.0)), (Some(16.0), None));
    assert!(!evictor.ready(15.9));
    assert!(victims(&mut evictor, claim(0.0, 1), &residents, 0, 15.9).is_empty());
    assert_eq!(victims(&mut evictor, claim(0.0, 1), &residents, 0, 16.0).len(), 1);
    let never = Evictor::new(2.0, 0.0);
    assert!(!never.ready(1e9) && never.next_s(0.0).is_none());
}

#[test]
fn of_equals_the_last_to_arrive() {
    let residents = [(5.0, 4), (5.0, 4), (6.0, 4), (5.0, 4)];
    assert_eq!(victims(&mut Evictor::new(2.0, 1.0), claim(0.0, 7), &residents, 0, 0.0), [2, 3]);
}
