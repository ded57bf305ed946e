//! A thread that learns while others predict.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use arc_swap::ArcSwap;

use super::{Estimate, Label, OnlineReadout, Stage, known};
use crate::noise::Noise;
use crate::readout::Readout;
use crate::remaining::{Objective, Order, RemainingTable};
use crate::rows::Row;
use crate::{Error, Result};

/// What was known at one moment; it never changes.
#[derive(Clone, Debug)]
pub struct Snapshot {
    readout: Option<Readout>,
    running_score: f32,
    warming: bool,
    noise: Noise,
    updates: u64,
}

impl Snapshot {
    fn of(online: &OnlineReadout) -> Self {
        let readout = match &online.stage {
            Stage::Ready { readout, .. } if online.known() => Some(readout.clone()),
            _ => None,
        };
        Self {
            readout,
            running_score: online.running_score(),
            warming: online.warming(),
            noise: online.noise.clone(),
            updates: online.updates(),
        }
    }

    /// The readout, once there is one.
    pub fn readout(&self) -> Option<&Readout> {
        self.readout.as_ref()
    }

    /// Noise of the predictions.
    pub fn noise(&self) -> &Noise {
        &self.noise
    }

    /// Updates applied by then.
    pub fn updates(&self) -> u64 {
        self.updates
    }
}

enum Message {
    Seen(Vec<f32>),
    Finished(Vec<f32>, Label),
    Flush(SyncSender<Result<usize>>),
    Save(PathBuf, SyncSender<Result<()>>),
    Stop,
}

/// Most labels that may be on their way to a learner.
const MOST_LABELS: usize = 1 << 20;

/// What readers hold. Cheap to share: predicting takes no lock, also while an update runs.
#[derive(Debug)]
pub struct Shared {
    d: usize,
    current: ArcSwap<Snapshot>,
    queue: SyncSender<Message>,
    dropped: AtomicU64,
    fault: Mutex<Option<String>>,
}

impl Shared {
    /// The estimate for one request, from its row of d features.
    ///
    /// # Errors
    /// [`Error::Readout`] where the width is wrong or a feature is NaN or infinite.
    pub fn estimate(&self, row: Row) -> Result<Estimate> {
        self.estimate_by(&self.current.load(), row, true)
    }

    /// The estimate and what it orders by, for a request that stops at `cap` tokens: score and noise are of the same
    /// moment. `counts`: whether the row may count for mean and scale, as it does in [`Self::estimate`]; it must not
    /// where a request is no sample of the traffic, or has been seen before.
    ///
    /// # Errors
    /// As [`Self::estimate`].
    pub fn table(
        &self,
        row: Row,
        cap: u32,
        order: Order,
        objective: Objective,
        counts: bool,
    ) -> Result<(Estimate, RemainingTable)> {
        let snapshot = self.current.load();
        let estimate = self.estimate_by(&snapshot, row, counts)?;
        Ok((estimate, RemainingTable::new(order, objective, estimate.score, &snapshot.noise, cap)))
    }

    fn estimate_by(&self, snapshot: &Snapshot, row: Row, counts: bool) -> Result<Estimate> {
        if let Some(readout) = &snapshot.readout {
            return known(readout, row);
        }
        row.check(0, self.d)?;
        if counts && snapshot.warming {
            // A row that finds the queue full is one of many: mean and scale do without it.
            let _ = self.queue.try_send(Message::Seen(row.to_f32_vec()));
        }
        Ok(Estimate { score: snapshot.running_score, known: false })
    }

    /// What is known now.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Hands over the length of a finished request and returns at once. `false`: the queue was full, or the learner
    /// has stopped, and the label was dropped.
    ///
    /// # Errors
    /// [`Error::Readout`] where the row or the length cannot be used.
    pub fn observe(&self, row: Row, label: Label) -> Result<bool> {
        row.check(0, self.d)?;
        if label.tokens() == 0 {
            return Err(Error::Readout("a length must be at least 1 token".into()));
        }
        match self.queue.try_send(Message::Finished(row.to_f32_vec(), label)) {
            Ok(()) => Ok(true),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
                Ok(false)
            }
        }
    }

    /// Labels dropped because the queue was full.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// The last thing that went wrong in the learner, which goes on without that batch.
    pub fn fault(&self) -> Option<String> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_fault(&self, text: String) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }
}

/// Owns the thread; dropping it stops and joins the thread after what is queued has been learned.
#[derive(Debug)]
pub struct Learner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Learner {
    /// Starts a thread that learns for `online`, with room for `capacity` labels on their way.
    ///
    /// # Errors
    /// [`Error::Config`] where `capacity` is not 1 to 2^20 or the system refuses a thread.
    pub fn start(online: OnlineReadout, capacity: usize) -> Result<Self> {
        // The queue's slots are made at once.
        if !(1..=MOST_LABELS).contains(&capacity) {
            return Err(Error::Config(format!("capacity is {capacity}, must be 1 to {MOST_LABELS}")));
        }
        let (queue, messages) = sync_channel(capacity);
        let shared = Arc::new(Shared {
            d: online.d(),
            current: ArcSwap::from_pointee(Snapshot::of(&online)),
            queue,
            dropped: AtomicU64::new(0),
            fault: Mutex::new(None),
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("leap-learner".into())
            .spawn(move || {
                let _telling = TellPanic(&theirs);
                work(online, &messages, &theirs);
            })
            .map_err(|e| Error::Config(format!("the learner's thread cannot start: {e}")))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// What readers hold.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Waits until all labels queued so far are learned, a part of a batch included.
    ///
    /// # Errors
    /// [`Error::Numeric`] where an update fails.
    pub fn flush(&self) -> Result<usize> {
        self.ask(Message::Flush)
    }

    /// Writes the whole state after all labels queued so far, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        self.ask(|reply| Message::Save(path.into(), reply))
    }

    fn ask<T>(&self, message: impl FnOnce(SyncSender<Result<T>>) -> Message) -> Result<T> {
        let stopped = || Error::Config("the learner has stopped".into());
        let (reply, answer) = sync_channel(1);
        self.shared.queue.send(message(reply)).map_err(|_| stopped())?;
        answer.recv().map_err(|_| stopped())?
    }
}

impl Drop for Learner {
    fn drop(&mut self) {
        let _ = self.shared.queue.send(Message::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Says in [`Shared::fault`] that the thread ended by a panic; without it, labels would be dropped for no given reason.
struct TellPanic<'a>(&'a Shared);

impl Drop for TellPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.set_fault("the learner's thread ended by a panic: nothing is learned any more".into());
        }
    }
}

fn work(mut online: OnlineReadout, messages: &Receiver<Message>, shared: &Shared) {
    while let Ok(message) = messages.recv() {
        let done = match message {
            Message::Seen(row) => online.warming().then(|| online.estimate(Row::F32(&row)).map(|_| ())),
            Message::Finished(row, label) => Some(online.observe(Row::F32(&row), label).map(|_| ())),
            Message::Flush(reply) => {
                let result = online.flush();
                shared.current.store(Arc::new(Snapshot::of(&online)));
                let _ = reply.send(result);
                continue;
            }
            Message::Save(path, reply) => {
                let _ = reply.send(online.save(&path));
                continue;
            }
            Message::Stop => return,
        };
        if let Some(Err(error)) = done {
            shared.set_fault(error.to_string());
        }
        let before = shared.current.load();
        if !online.known() || online.updates() != before.updates {
            shared.current.store(Arc::new(Snapshot::of(&online)));
        }
    }
}
