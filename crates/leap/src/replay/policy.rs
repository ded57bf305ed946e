//! Policies by name and option, as `NAME[:key=value,...]`: who is admitted next, who decodes next, who gives way.

use serde::Serialize;

use super::config::EngineConfig;
use super::encoder::ENCODER_S;
use super::trace::Trace;
use crate::levers::admission::RECOMPUTE_SHARE;
use crate::levers::aging::{AGING, Aging};
use crate::readout::Kind;
use crate::remaining::{Objective, Order};
use crate::{Error, Result};

mod spelling;

/// What a policy goes by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// First come first served: stock vLLM.
    Fcfs,
    /// Shortest prompt first.
    SjfPrompt,
    /// Highest response ratio next, the prompt length as the service time.
    Hrrn,
    /// Least attained service: fewest tokens generated first.
    Las,
    /// Multi-level feedback: levels of attained service, first come first served in a level.
    Mlfq,
    /// Shortest true length first, in the queue.
    SjfOracle,
    /// Shortest true remaining length first, in the queue and the slots.
    SrptOracle,
    /// The state readout, not updated.
    LeapFrozen,
    /// The state readout with updates.
    LeapPaper,
    /// Every readout that the trace has features for, with updates.
    Leap,
    /// Another predictor's scores, from a column of the trace.
    Score(String),
}

/// Where the order acts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Levers {
    /// Who is admitted next.
    pub queue: bool,
    /// Who decodes next, and who is preempted when KV blocks run out.
    pub slots: bool,
    /// Who gives its KV cache to a better one that waits.
    pub evict: bool,
    /// Whether the first of the queue may come in, by the memory to come.
    pub admission: bool,
}

/// The readouts that a policy goes by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReadoutSet {
    /// On arrival.
    pub prompt: bool,
    /// Once the encoder has read the prompt.
    pub text: bool,
    /// After prefill.
    pub state: bool,
}

impl ReadoutSet {
    const ALL: Self = Self { prompt: true, text: true, state: true };

    /// Whether a kind of readout is among them.
    pub fn has(&self, kind: Kind) -> bool {
        match kind {
            Kind::Prompt => self.prompt,
            Kind::Text => self.text,
            Kind::State => self.state,
        }
    }

    fn put(&mut self, kind: Kind, there: bool) {
        match kind {
            Kind::Prompt => self.prompt = there,
            Kind::Text => self.text = there,
            Kind::State => self.state = there,
        }
    }
}

/// A policy with every option in force.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicySpec {
    /// The specification as it was given.
    pub name: String,
    /// What the policy goes by.
    pub rule: Rule,
    /// Where its order acts.
    pub levers: Levers,
    /// The readouts that it goes by.
    pub readouts: ReadoutSet,
    /// Order of one request, where the policy predicts.
    pub order: Order,
    /// What the Gittins order serves.
    pub objective: Objective,
    /// Whether finished requests correct the readouts.
    pub rls: bool,
    /// Finished requests an update.
    pub batch: usize,
    /// How waiting raises a request.
    #[serde(flatten)]
    pub aging: Aging,
    /// Weight of the KV term in the queue's and the evict lever's key.
    pub memory_weight: f64,
    /// Weight of the KV term in the slots' key.
    pub slots_memory_weight: f64,
    /// Share of the computed tokens that admission control lets be computed again.
    pub recompute_share: f64,
    /// A resident that has not decoded for so many steps gets the next slot.
    pub wait_cap_steps: Option<u32>,
    /// A request that has waited so many seconds is admitted next.
    pub wait_cap_s: Option<f64>,
    /// A resident takes a slot from one that has it only if it is so many times shorter.
    pub hysteresis: f64,
    /// How many times worse than the waiting request a resident must be to be evicted.
    pub evict_factor: f64,
    /// Most evictions a second.
    pub evict_per_s: f64,
    /// Seconds until another predictor's score is there.
    pub delay_s: f64,
    /// Share of the GPU that another predictor takes while it computes.
    pub gpu_share: f64,
    /// Seconds that the encoder takes for a prompt.
    pub encoder_s: f64,
    /// Whether the aging rate was given, so that a sweep leaves it alone.
    #[serde(skip)]
    pub aging_given: bool,
    /// Whether the levers were given, so that they do not follow the engine.
    #[serde(skip)]
    pub levers_given: bool,
    /// Whether the readouts were given, so that they do not follow the trace.
    #[serde(skip)]
    pub readouts_given: bool,
}

impl PolicySpec {
    fn of(rule: Rule) -> Self {
        let queue = Levers { queue: true, ..Levers::default() };
        let slots = Levers { slots: true, ..Levers::default() };
        let both = Levers { queue: true, slots: true, ..Levers::default() };
        let plain = Self {
            name: String::new(),
            rule: rule.clone(),
            levers: queue,
            readouts: ReadoutSet::default(),
            order: Order::Countdown,
            objective: Objective::Ptl,
            rls: false,
            batch: 8,
            aging: Aging::PerSecond(0.05),
            memory_weight: 0.0,
            slots_memory_weight: 0.0,
            recompute_share: RECOMPUTE_SHARE,
            wait_cap_steps: None,
            wait_cap_s: None,
            hysteresis: 1.0,
            evict_factor: 2.0,
            evict_per_s: 1.0,
            delay_s: 0.0,
            gpu_share: 0.0,
            encoder_s: ENCODER_S,
            aging_given: false,
            levers_given: false,
            readouts_given: false,
        };
        let paper = || {
            let readouts = ReadoutSet { state: true, ..ReadoutSet::default() };
            Self { levers: slots, readouts, aging: Aging::NONE, wait_cap_steps: Some(128), ..plain.clone() }
        };
        match rule {
            Rule::Fcfs => Self { levers: Levers::default(), aging: Aging::NONE, ..plain },
            Rule::SjfPrompt => plain,
            Rule::Hrrn => Self { aging: Aging::NONE, ..plain },
            Rule::Las | Rule::Mlfq => Self { levers: both, ..plain },
            Rule::SjfOracle => {
                Self { levers: Levers { admission: true, ..queue }, aging: Aging::NONE, memory_weight: 1.0, ..plain }
            }
            Rule::SrptOracle => {
                Self { levers: Levers { admission: true, ..both }, aging: Aging::NONE, memory_weight: 1.0, ..plain }
            }
            Rule::LeapFrozen => paper(),
            Rule::LeapPaper => Self { rls: true, ..paper() },
            Rule::Leap => {
                let levers = Levers { admission: true, ..queue };
                let aging = Aging::PerWait(AGING);
                let (readouts, order) = (ReadoutSet::ALL, Order::Gittins);
                Self { levers, readouts, order, aging, rls: true, memory_weight: 1.0, hysteresis: 1.1, ..plain }
            }
            Rule::Score(_) => Self { memory_weight: 1.0, ..plain },
        }
    }

    /// Whether the policy reads the trace's features with leap's own readouts.
    pub fn has_readout(&self) -> bool {
        matches!(self.rule, Rule::LeapFrozen | Rule::LeapPaper | Rule::Leap)
    }

    /// Whether remaining lengths are in tokens squared, and not in tokens.
    pub(super) fn is_squared(&self) -> bool {
        self.has_readout() && self.order == Order::Gittins && self.objective == Objective::Ptl
    }

    /// The column that another predictor's policy reads; empty for every other policy.
    ///
    /// # Errors
    /// [`Error::Config`] where the trace has no such column.
    pub(super) fn scores<'a>(&self, trace: &'a Trace) -> Result<&'a [f32]> {
        let Rule::Score(name) = &self.rule else { return Ok(&[]) };
        trace.score(name).ok_or_else(|| Error::Config(format!("policy {self}: the trace has no column score_{name}")))
    }

    /// The same policy as it can act on a trace: readouts that were not asked for go where their features are missing.
    ///
    /// # Errors
    /// [`Error::Config`] where a column is missing that the policy was told to go by.
    pub fn over(mut self, trace: &Trace) -> Result<Self> {
        self.scores(trace)?;
        for kind in Kind::ALL {
            if trace.width(kind).is_none() && self.readouts.has(kind) {
                if self.readouts_given {
                    let column = Trace::column(kind);
                    return Err(Error::Config(format!("policy {self}: the trace has no column {column}")));
                }
                self.readouts.put(kind, false);
            }
        }
        Ok(self)
    }

    /// The same policy with another aging, unless it was given one or has none.
    #[must_use]
    pub fn aged(mut self, aging: Aging) -> Self {
        if !self.aging_given && !self.aging.is_none() {
            self.aging = aging;
        }
        self
    }

    /// The same policy as it acts on an engine: `leap` has the slots lever where decode slots are fewer than seats, unless
    /// its levers were given.
    #[must_use]
    pub fn on(mut self, engine: &EngineConfig) -> Self {
        if self.rule == Rule::Leap && !self.levers_given {
            self.levers.slots = engine.slots() < engine.max_num_seqs;
        }
        self
    }
}
