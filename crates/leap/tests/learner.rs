//! A learner's thread beside its readers.

#![allow(clippy::needless_range_loop, reason = "a request is its number: its row, its length, its place in time")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::Directory;
use common::traffic::{fitted, from_zero, row, traffic};
use leap::Error;
use leap::online::{Label, Learner, OnlineOptions, OnlineReadout};
use leap::remaining::{Objective, Order, RemainingTable};
use leap::rls::Precision;
use leap::rows::Row;
use ndarray::s;

#[test]
fn readers_see_whole_snapshots_while_it_learns() {
    let (x, lengths) = traffic(8, 400, 16);
    let (readout, anchor) = fitted(&x.slice(s![..100, ..]).to_owned(), &lengths[..100]);
    let options = OnlineOptions { batch: 1, ..OnlineOptions::default() };
    // What a single thread gets after each update is all that a reader may ever see.
    let mut alone = OnlineReadout::new(readout, Some(anchor), options).unwrap();
    let learner = Learner::start(alone.clone(), 1000).unwrap();
    let mut allowed = vec![alone.estimate(row(&x, 0)).unwrap().score];
    for i in 100..400 {
        alone.observe(row(&x, i), Label::Exact(lengths[i])).unwrap();
        allowed.push(alone.estimate(row(&x, 0)).unwrap().score);
    }
    let done = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (shared, done, x, allowed) =
                (Arc::clone(learner.shared()), Arc::clone(&done), x.clone(), allowed.clone());
            std::thread::spawn(move || {
                let mut seen = 0;
                loop {
                    let last = done.load(Ordering::Acquire);
                    let estimate = shared.estimate(row(&x, 0)).unwrap();
                    assert!(estimate.known && allowed.contains(&estimate.score));
                    seen += 1;
                    if last {
                        return (seen, estimate.score);
                    }
                }
            })
        })
        .collect();
    for i in 100..400 {
        assert!(learner.shared().observe(row(&x, i), Label::Exact(lengths[i])).unwrap());
    }
    assert_eq!(learner.flush().unwrap(), 0);
    done.store(true, Ordering::Release);
    for reader in readers {
        let (seen, score) = reader.join().unwrap();
        assert!(seen > 0);
        assert_eq!(score, *allowed.last().unwrap());
    }
    assert_eq!(learner.shared().snapshot().updates(), 300);
    assert_eq!((learner.shared().dropped(), learner.shared().fault()), (0, None));

    let dir = Directory::new("learner");
    let (one, two) = (dir.0.join("one"), dir.0.join("two"));
    learner.save(&one).unwrap();
    alone.save(&two).unwrap();
    assert_eq!(std::fs::read(&one).unwrap(), std::fs::read(&two).unwrap());
    assert!(matches!(learner.save(&dir.0.join("no").join("where")), Err(Error::Io { .. })));
    let shared = Arc::clone(learner.shared());
    drop(learner);
    assert!(!shared.observe(row(&x, 1), Label::Exact(3)).unwrap());
    assert!(shared.estimate(row(&x, 0)).unwrap().known);
    assert_eq!(shared.dropped(), 1);
}

#[test]
fn a_learner_warms_up_from_the_rows_that_readers_ask_about() {
    let (x, lengths) = traffic(9, 100, 4);
    let learner = Learner::start(from_zero(4, 20, 4, Precision::F32), 256).unwrap();
    let shared = learner.shared();
    for i in 0..40 {
        shared.estimate(row(&x, i)).unwrap();
        shared.observe(row(&x, i), Label::Exact(lengths[i])).unwrap();
    }
    learner.flush().unwrap();
    assert!(shared.snapshot().readout().is_some());
    assert!(shared.estimate(row(&x, 50)).unwrap().known);
    assert!(shared.estimate(Row::F32(&[f32::NAN; 4])).is_err());
    assert!(shared.observe(Row::F32(&[0.0; 3]), Label::Exact(3)).is_err());
}

#[test]
fn dropping_a_busy_learner_learns_what_is_queued() {
    let (x, lengths) = traffic(11, 400, 16);
    let (readout, anchor) = fitted(&x, &lengths);
    let options = OnlineOptions { batch: 1, ..OnlineOptions::default() };
    let online = OnlineReadout::new(readout, Some(anchor), options).unwrap();
    // A queue of one slot is full nearly always, also at the moment of the drop.
    for capacity in [1, 1000] {
        let learner = Learner::start(online.clone(), capacity).unwrap();
        let shared = Arc::clone(learner.shared());
        let taken = (0..400).filter(|&i| shared.observe(row(&x, i), Label::Exact(lengths[i])).unwrap()).count();
        drop(learner);
        assert_eq!(shared.snapshot().updates(), taken as u64);
        assert_eq!(shared.dropped(), 400 - taken as u64);
        assert_eq!(shared.fault(), None);
    }
}

#[test]
fn a_row_that_was_seen_does_not_count_for_mean_and_scale() {
    let (x, _) = traffic(17, 60, 8);
    let start = from_zero(8, 30, 8, Precision::F64);
    let mut alone = start.clone();
    let learner = Learner::start(start, 100).unwrap();
    let look =
        |i: usize, counts| learner.shared().table(row(&x, i), 100, Order::Gittins, Objective::Ptl, counts).unwrap();
    for i in 0..30 {
        look(30 + i, false);
        look(i, true);
        alone.estimate(row(&x, i)).unwrap();
    }
    learner.flush().unwrap();
    for i in 0..16 {
        learner.shared().observe(row(&x, i), Label::Exact(100)).unwrap();
        alone.observe(row(&x, i), Label::Exact(100)).unwrap();
    }
    learner.flush().unwrap();
    let (estimate, table) = look(40, true);
    assert_eq!(estimate, alone.estimate(row(&x, 40)).unwrap());
    assert!(estimate.known);
    assert_eq!((table.score(), table.cap()), (estimate.score, 100));
    let expected = RemainingTable::new(Order::Gittins, Objective::Ptl, estimate.score, alone.noise(), 100);
    assert_eq!(table.remaining(50), expected.remaining(50));
}
