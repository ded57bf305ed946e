//! The heap against a sorted list, and the aging queue against its own promise.

use leap::queue::{AgingQueue, Head, KeyedHeap, Urgency, overtake_bound, static_key};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Push(u32, f64, u64),
    Pop,
    Remove(u32),
    Rekey(u32, f64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Few ids, keys and ties, so that every kind of collision comes up.
    let key = prop_oneof![(-3i8..3).prop_map(f64::from), Just(-0.0), Just(f64::INFINITY)];
    let step = prop_oneof![
        4 => (0u32..24, key.clone(), 0u64..3).prop_map(|(id, key, tie)| Step::Push(id, key, tie)),
        2 => Just(Step::Pop),
        1 => (0u32..24).prop_map(Step::Remove),
        2 => (0u32..24, key).prop_map(|(id, key)| Step::Rekey(id, key)),
    ];
    prop::collection::vec(step, 0..200)
}

proptest! {
    #[test]
    fn heap_agrees_with_a_sorted_list(steps in steps()) {
        let mut heap = KeyedHeap::new();
        let mut model: Vec<(f64, u64, u32)> = Vec::new();
        for step in steps {
            match step {
                Step::Push(id, key, tie) => {
                    let fresh = !model.iter().any(|entry| entry.2 == id);
                    prop_assert_eq!(heap.push(id, key, tie), fresh);
                    if fresh {
                        model.push((key, tie, id));
                    }
                }
                Step::Pop => {
                    let first = (!model.is_empty()).then(|| model.remove(0));
                    prop_assert_eq!(heap.pop(), first.map(|entry| (entry.2, entry.0)));
                }
                Step::Remove(id) => {
                    let at = model.iter().position(|entry| entry.2 == id);
                    prop_assert_eq!(heap.remove(id), at.is_some());
                    at.map(|at| model.remove(at));
                }
                Step::Rekey(id, key) => {
                    let found = model.iter_mut().find(|entry| entry.2 == id);
                    prop_assert_eq!(heap.rekey(id, key), found.is_some());
                    if let Some(entry) = found {
                        entry.0 = key;
                    }
                }
            }
            model.sort_by(|a, b| a.partial_cmp(b).unwrap());
            prop_assert_eq!(heap.len(), model.len());
            prop_assert_eq!(heap.peek(), model.first().map(|entry| (entry.2, entry.0)));
            for id in 0..24 {
                prop_assert_eq!(heap.contains(id), model.iter().any(|entry| entry.2 == id));
            }
        }
    }

    #[test]
    fn nobody_is_overtaken_from_beyond_the_bound(
        events in prop::collection::vec((0.0..5.0f64, 1.0..20_000.0f64, 1.0..30_000.0f64, 0u8..3), 1..150),
        aging_rate in 0.001..1.0f64,
        memory_weight in prop_oneof![Just(0.0), 0.0..2.0f64],
    ) {
        let mut queue = AgingQueue::new(aging_rate).unwrap().with_memory_weight(memory_weight).unwrap();
        let mut waiting: Vec<(u64, f64, f64, f64)> = Vec::new();
        let mut now = 0.0;
        for (id, (gap, remaining, memory, pops)) in events.into_iter().enumerate() {
            now += gap;
            queue.push_with_memory(id as u64, remaining, now, memory).unwrap();
            waiting.push((id as u64, remaining, now, memory));
            for _ in 0..pops {
                let Some(taken) = queue.pop() else { break };
                let at = waiting.iter().position(|request| request.0 == taken).unwrap();
                let (_, s2, t2, memory2) = waiting.remove(at);
                for &(_, s1, t1, memory1) in &waiting {
                    // The memory terms' difference adds to the logarithm of the lengths.
                    let extra = (memory1 / memory2).powf(memory_weight);
                    let bound = overtake_bound(s1 * extra, s2, aging_rate);
                    prop_assert!(t2 - t1 <= bound + 1e-9, "arrived {} later, bound {bound}", t2 - t1);
                }
            }
        }
        prop_assert_eq!(queue.len(), waiting.len());
    }

    #[test]
    fn capped_waits_go_first_oldest_ahead(
        arrivals in prop::collection::vec((0u16..100, 1.0..1000.0f64, 0u16..40), 1..60),
        // Whole seconds, so that some have waited for the cap to the second.
        cap in 0u16..60,
        pops in prop::collection::vec(0u16..160, 1..60),
    ) {
        let mut queue = AgingQueue::new(0.01).unwrap().with_wait_cap_s(Some(f64::from(cap))).unwrap();
        let mut waiting: Vec<(u64, f64, f64)> = Vec::new();
        for (id, &(arrival, remaining, later)) in arrivals.iter().enumerate() {
            let (arrival, queued) = (f64::from(arrival), f64::from(arrival + later));
            queue.push_queued(id as u64, remaining, arrival, 1.0, queued).unwrap();
            waiting.push((id as u64, queued, static_key(remaining, 0.01, arrival, 0.0, 0.0)));
        }
        for now in pops {
            let now = f64::from(now);
            let overdue = waiting.iter().filter(|r| now - r.1 >= f64::from(cap)).min_by(|x, y| x.1.total_cmp(&y.1).then(x.0.cmp(&y.0)));
            let plain = waiting.iter().min_by(|x, y| x.2.total_cmp(&y.2).then(x.0.cmp(&y.0)));
            let expected = overdue.or(plain).map(|r| r.0);
            prop_assert_eq!(queue.peek_at(now), expected);
            let promoted = overdue.map(|r| r.0) != plain.map(|r| r.0) && overdue.is_some();
            let head = expected.map(|id| Head { id, overdue: overdue.is_some(), promoted });
            prop_assert_eq!(queue.head(now), head);
            prop_assert_eq!(queue.pop_at(now), expected);
            waiting.retain(|r| Some(r.0) != expected);
        }
    }

    #[test]
    fn the_whole_order_is_what_one_pop_after_the_other_takes(
        requests in prop::collection::vec((0u16..60, 1u16..6, 0u16..40), 0..60),
        gone in prop::collection::vec(0u64..60, 0..20),
        cap in prop::option::of(0u16..60),
        now in 0u16..140,
    ) {
        let now = f64::from(now);
        let mut queue = AgingQueue::new(0.1).unwrap().with_wait_cap_s(cap.map(f64::from)).unwrap();
        let mut since = std::collections::HashMap::new();
        // Few lengths and whole seconds, so that there are ties of both kinds.
        for (id, &(arrival, remaining, later)) in requests.iter().enumerate() {
            let (arrival, queued) = (f64::from(arrival), f64::from(arrival + later));
            queue.push_queued(id as u64, f64::from(remaining), arrival, 1.0, queued).unwrap();
            since.insert(id as u64, queued);
        }
        for id in gone {
            queue.remove(id);
        }
        let order = queue.order_at(now);
        for (place, &id) in order.iter().enumerate() {
            prop_assert_eq!(queue.place_at(id, now), Some(place));
            let urgency = queue.urgency_at(id, now).unwrap();
            let overdue = cap.is_some_and(|cap| now - since[&id] >= f64::from(cap));
            let at = if overdue { since[&id] } else { queue.key(id).unwrap() };
            prop_assert_eq!(urgency, Urgency { overdue, at });
        }
        let due = |id: &u64| Some(since[id] + f64::from(cap?)).filter(|&due| due > now);
        prop_assert_eq!(queue.next_overdue(now), order.iter().filter_map(due).min_by(f64::total_cmp));
        let mut popped = Vec::new();
        while let Some(id) = queue.pop_at(now) {
            popped.push(id);
        }
        prop_assert_eq!(order, popped);
        prop_assert_eq!(queue.place_at(0, now), None);
    }
}

#[test]
fn static_key_is_exponential_aging() {
    // S * gamma^(waited / tau) at any one time orders two requests as their static keys do; TIE: gamma 0.9, tau 30 s.
    let rate = -(0.9f64.ln()) / 30.0;
    assert!((rate - 0.003512).abs() < 1e-6);
    let aged = |s: f64, arrival: f64, now: f64| s * 0.9f64.powf((now - arrival) / 30.0);
    for (s1, t1, s2, t2) in [(1000.0, 0.0, 500.0, 190.0), (1000.0, 0.0, 500.0, 205.0), (80.0, 3.0, 81.0, 3.0)] {
        let first = static_key(s1, rate, t1, 0.0, 0.0) < static_key(s2, rate, t2, 0.0, 0.0);
        assert_eq!(first, aged(s1, t1, 300.0) < aged(s2, t2, 300.0));
    }
    // ln 2 / 0.003512 = 197.4 s.
    assert!((overtake_bound(1000.0, 500.0, rate) - 197.37).abs() < 0.01);
    assert_eq!(overtake_bound(500.0, 1000.0, rate), 0.0);
    assert_eq!(overtake_bound(1000.0, 500.0, 0.0), f64::INFINITY);
    assert_eq!(overtake_bound(500.0, 500.0, 0.0), 0.0);
}

#[test]
fn memory_counts_only_with_its_weight() {
    let bare = static_key(100.0, 0.1, 2.0, 0.0, 5000.0);
    assert!((bare - (100f64.ln() + 0.2)).abs() < 1e-12);
    assert!((static_key(100.0, 0.1, 2.0, 0.5, 5000.0) - bare - 0.5 * 5000f64.ln()).abs() < 1e-12);
    assert_eq!(static_key(100.0, 0.1, 2.0, 0.5, 0.0), bare);
}

#[test]
fn equal_keys_leave_as_they_came_and_rekeys_move() {
    let mut queue = AgingQueue::new(0.0).unwrap();
    for id in [7, 3, 9] {
        queue.push(id, 10.0, 0.0).unwrap();
    }
    assert_eq!(queue.peek(), Some(7));
    assert!(queue.rekey(9, 5.0).unwrap());
    assert!(!queue.rekey(42, 5.0).unwrap());
    assert!(queue.remove(7) && !queue.remove(7));
    assert_eq!((queue.pop(), queue.pop(), queue.pop()), (Some(9), Some(3), None));
    // An id may come again once it is out.
    queue.push(7, 10.0, 1.0).unwrap();
    assert!(queue.contains(7) && queue.len() == 1);
}

#[test]
fn plain_pop_ignores_the_wait_cap() {
    let mut queue = AgingQueue::new(0.0).unwrap().with_wait_cap_s(Some(10.0)).unwrap();
    queue.push(1, 900.0, 0.0).unwrap();
    queue.push(2, 5.0, 50.0).unwrap();
    assert_eq!(queue.peek(), Some(2));
    assert_eq!(queue.peek_at(9.5), Some(2));
    assert_eq!(queue.peek_at(10.0), Some(1));
    assert_eq!(queue.pop(), Some(2));
}

#[test]
fn a_wait_counts_from_the_entry_into_the_queue() {
    let mut queue = AgingQueue::new(0.0).unwrap().with_wait_cap_s(Some(10.0)).unwrap();
    // The first to arrive was preempted and came back last.
    queue.push_queued(1, 900.0, 0.0, 1.0, 7.0).unwrap();
    queue.push(2, 300.0, 5.0).unwrap();
    queue.push(3, 5.0, 6.0).unwrap();
    assert_eq!(queue.head(14.0), Some(Head { id: 3, overdue: false, promoted: false }));
    assert_eq!(queue.head(15.0), Some(Head { id: 2, overdue: true, promoted: true }));
    assert!(queue.remove(2));
    assert_eq!(queue.head(16.0), Some(Head { id: 3, overdue: true, promoted: false }));
    assert!(queue.remove(3));
    assert_eq!(queue.head(16.5), Some(Head { id: 1, overdue: false, promoted: false }));
    assert_eq!(AgingQueue::new(0.0).unwrap().head(0.0), None);
}

#[test]
fn bad_values_are_refused_and_change_nothing() {
    for rate in [-0.1, f64::NAN, f64::INFINITY] {
        assert!(AgingQueue::new(rate).unwrap_err().to_string().contains("aging_rate"));
    }
    let mut queue = AgingQueue::new(0.1).unwrap();
    queue.push(1, 10.0, 0.0).unwrap();
    for remaining in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(queue.push(2, remaining, 0.0).unwrap_err().to_string().contains("request 2: remaining"));
        assert!(queue.rekey(1, remaining).is_err());
    }
    assert!(queue.push(2, 1.0, f64::NAN).unwrap_err().to_string().contains("arrival_s"));
    assert!(queue.push_queued(2, 1.0, 0.0, 1.0, f64::INFINITY).unwrap_err().to_string().contains("queued_s"));
    assert!(queue.push_with_memory(2, 1.0, 0.0, f64::NAN).unwrap_err().to_string().contains("memory_tokens"));
    assert!(queue.push(1, 1.0, 0.0).unwrap_err().to_string().contains("already"));
    assert_eq!((queue.len(), queue.key(1), queue.contains(2)), (1, Some(10f64.ln()), false));
}
