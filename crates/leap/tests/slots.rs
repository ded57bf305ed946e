//! Decode slots against a full sort.

use leap::levers::{select_by_remaining, select_slots};
use proptest::prelude::*;

/// What the rule says, by sorting everybody.
fn sorted(keys: &[f64], waited: &[u32], slots: usize, cap: Option<u32>) -> Vec<u32> {
    let mut all: Vec<usize> = (0..keys.len()).collect();
    all.sort_by(|&x, &y| {
        let rank = |i: usize| match cap {
            Some(cap) if waited[i] >= cap => (0, -f64::from(waited[i])),
            _ => (1, keys[i]),
        };
        rank(x).partial_cmp(&rank(y)).unwrap().then(x.cmp(&y))
    });
    let mut chosen: Vec<u32> = all.into_iter().take(slots).map(|i| i as u32).collect();
    chosen.sort_unstable();
    chosen
}

proptest! {
    #[test]
    fn selection_equals_sorting(
        residents in prop::collection::vec((-4i8..4, 0u32..6), 0..80),
        slots in 0usize..90,
        cap in prop::option::of(0u32..7),
    ) {
        let keys: Vec<f64> = residents.iter().map(|r| f64::from(r.0)).collect();
        let waited: Vec<u32> = residents.iter().map(|r| r.1).collect();
        prop_assert_eq!(select_slots(&keys, &waited, slots, cap), sorted(&keys, &waited, slots, cap));
    }

    #[test]
    fn remaining_and_arrival_make_the_keys(
        residents in prop::collection::vec((1.0..9000.0f64, 0.0..500.0f64, 0u32..200), 0..80),
        slots in 0usize..90,
        aging_rate in 0.0..0.2f64,
    ) {
        let remaining: Vec<f64> = residents.iter().map(|r| r.0).collect();
        let arrival: Vec<f64> = residents.iter().map(|r| r.1).collect();
        let waited: Vec<u32> = residents.iter().map(|r| r.2).collect();
        let keys: Vec<f64> = residents.iter().map(|r| r.0.ln() + aging_rate * r.1).collect();
        let chosen = select_by_remaining(&remaining, &arrival, &waited, slots, aging_rate, Some(128)).unwrap();
        prop_assert_eq!(chosen, sorted(&keys, &waited, slots, Some(128)));
    }
}

#[test]
fn the_longest_waiting_goes_before_the_shortest() {
    assert_eq!(select_slots(&[1.0, 2.0, 3.0, 4.0], &[0, 0, 130, 128], 2, Some(128)), [2, 3]);
    assert_eq!(select_slots(&[1.0, 2.0, 3.0, 4.0], &[0, 0, 130, 128], 1, Some(128)), [2]);
    assert_eq!(select_slots(&[1.0, 2.0, 3.0, 4.0], &[0, 0, 130, 128], 2, None), [0, 1]);
    assert_eq!(select_slots(&[f64::NEG_INFINITY, 9.0], &[0, 0], 1, Some(0)), [0]);
    assert_eq!(select_slots(&[f64::NEG_INFINITY, 9.0], &[0, 1], 1, Some(1)), [1]);
    assert_eq!(select_slots(&[f64::NEG_INFINITY, -9.0, -1e-300, 0.0, 9.0], &[], 3, Some(1)), [0, 1, 2]);
}

#[test]
fn a_key_that_is_no_number_goes_last() {
    assert_eq!(select_slots(&[f64::NAN, 5.0, -f64::NAN, f64::INFINITY], &[0; 4], 2, None), [1, 3]);
    assert_eq!(select_slots(&[0.0, -0.0], &[0; 2], 1, None), [0]);
}

#[test]
fn bad_values_are_named_with_their_index() {
    let fails = |remaining: &[f64], arrival: &[f64], waited: &[u32], rate: f64| {
        select_by_remaining(remaining, arrival, waited, 1, rate, None).unwrap_err().to_string()
    };
    assert!(fails(&[1.0, 0.0], &[0.0; 2], &[0; 2], 0.1).contains("remaining[1]"));
    assert!(fails(&[1.0, 2.0], &[0.0, f64::NAN], &[0; 2], 0.1).contains("arrival_s[1]"));
    assert!(fails(&[1.0, 2.0], &[0.0], &[0; 2], 0.1).contains("2, 1 and 2 values"));
    assert!(fails(&[1.0], &[0.0], &[0], -1.0).contains("aging_rate"));
}
