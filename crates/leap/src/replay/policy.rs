//! Policies by name and option, as `NAME[:key=value,...]`: who is admitted next, who decodes next, who gives way.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::config::EngineConfig;
use super::trace::Trace;
use crate::levers::admission::RECOMPUTE_SHARE;
use crate::levers::aging::{AGING, Aging};
use crate::remaining::{Objective, Order};
use crate::{Error, Result};

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
    /// Both readouts with updates.
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

/// A policy with every option in force.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicySpec {
    /// The specification as it was given.
    pub name: String,
    /// What the policy goes by.
    pub rule: Rule,
    /// Where its order acts.
    pub levers: Levers,
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
    /// Whether the aging rate was given, so that a sweep leaves it alone.
    #[serde(skip)]
    pub aging_given: bool,
    /// Whether the levers were given, so that they do not follow the engine.
    #[serde(skip)]
    pub levers_given: bool,
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
            aging_given: false,
            levers_given: false,
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
            Rule::LeapFrozen => Self { levers: slots, aging: Aging::NONE, wait_cap_steps: Some(128), ..plain },
            Rule::LeapPaper => {
                Self { levers: slots, aging: Aging::NONE, wait_cap_steps: Some(128), rls: true, ..plain }
            }
            Rule::Leap => {
                let levers = Levers { admission: true, ..queue };
                let aging = Aging::PerWait(AGING);
                let order = Order::Gittins;
                Self { levers, order, aging, rls: true, memory_weight: 1.0, hysteresis: 1.1, ..plain }
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

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let wrong = |wanted: &str| Error::Config(format!("policy {}: {key}={value} is not {wanted}", self.name));
        let number = |low: f64, high: f64| {
            let wanted = || {
                if high.is_finite() {
                    format!("a number from {low} to {high}")
                } else {
                    format!("a number from {low} on")
                }
            };
            value
                .parse::<f64>()
                .ok()
                .filter(|x| x.is_finite() && (low..=high).contains(x))
                .ok_or_else(|| wrong(&wanted()))
        };
        let predicts = self.has_readout() || matches!(self.rule, Rule::Score(_));
        let needs = |there: bool, what: &str| {
            if there { Ok(()) } else { Err(Error::Config(format!("policy {}: {key} needs {what}", self.name))) }
        };
        match key {
            "levers" => {
                let mut levers = Levers::default();
                for lever in value.split('+') {
                    match lever {
                        "queue" => levers.queue = true,
                        "slots" => levers.slots = true,
                        "evict" => levers.evict = true,
                        "admission" => levers.admission = true,
                        _ => return Err(wrong("levers joined by +, of queue, slots, evict and admission")),
                    }
                }
                let orders = levers.queue || levers.slots || levers.evict;
                let fixed = matches!(self.rule, Rule::Fcfs | Rule::Hrrn);
                needs(!(orders && fixed), "a policy with an order of its own")?;
                levers.queue |= self.rule == Rule::Hrrn;
                self.levers = levers;
                self.levers_given = true;
            }
            "order" => {
                needs(self.has_readout(), "a policy with a readout")?;
                self.order = value.parse().map_err(|_| wrong("one of countdown, survival and gittins"))?;
            }
            "objective" => {
                needs(self.has_readout(), "a policy with a readout")?;
                self.objective = value.parse().map_err(|_| wrong("one of ptl and e2el"))?;
            }
            "rls" => {
                needs(self.has_readout(), "a policy with a readout")?;
                self.rls = match value {
                    "on" => true,
                    "off" => false,
                    _ => return Err(wrong("on or off")),
                };
            }
            "batch" => {
                needs(self.has_readout(), "a policy with a readout")?;
                self.batch = number(1.0, 4096.0)? as usize;
            }
            "aging_rate" => {
                needs(!matches!(self.rule, Rule::Fcfs | Rule::Hrrn), "a policy with an order of its own")?;
                self.age(Aging::PerSecond(number(0.0, 1e6)?))?;
            }
            "aging" => {
                needs(!matches!(self.rule, Rule::Fcfs | Rule::Hrrn), "a policy with an order of its own")?;
                self.age(Aging::PerWait(number(0.0, 1e3)?))?;
            }
            "memory_weight" => self.memory_weight = number(0.0, 100.0)?,
            "recompute_share" => self.recompute_share = number(0.0001, 0.5)?,
            "wait_cap_steps" => {
                self.wait_cap_steps = if value == "none" { None } else { Some(number(1.0, 1e9)? as u32) };
            }
            "wait_cap_s" => self.wait_cap_s = if value == "none" { None } else { Some(number(0.0, 1e9)?) },
            "hysteresis" => self.hysteresis = number(1.0, 100.0)?,
            "evict_factor" => self.evict_factor = number(1.0, 1e9)?,
            "evict_per_s" => self.evict_per_s = number(0.0, 1e9)?,
            "delay_s" | "gpu_share" => {
                needs(predicts && !self.has_readout(), "a score:NAME policy")?;
                if key == "delay_s" { self.delay_s = number(0.0, 1e6)? } else { self.gpu_share = number(0.0, 0.99)? }
            }
            _ => {
                return Err(Error::Config(format!(
                    "policy {}: unknown key {key}; known are levers, order, objective, rls, batch, aging, \
                     aging_rate, memory_weight, recompute_share, wait_cap_steps, wait_cap_s, hysteresis, evict_factor, \
                     evict_per_s, delay_s and gpu_share",
                    self.name
                )));
            }
        }
        Ok(())
    }
}

impl PolicySpec {
    fn age(&mut self, aging: Aging) -> Result<()> {
        if self.aging_given {
            return Err(Error::Config(format!("policy {}: aging and aging_rate exclude each other", self.name)));
        }
        self.aging = aging;
        self.aging_given = true;
        Ok(())
    }
}

impl fmt::Display for PolicySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl FromStr for PolicySpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, options) = match text.strip_prefix("score:") {
            Some(rest) => {
                let end = rest.find(':').map_or(text.len(), |colon| "score:".len() + colon);
                (&text[..end], text.get(end + 1..))
            }
            None => text.split_once(':').map_or((text, None), |(name, options)| (name, Some(options))),
        };
        let rule = match name {
            "fcfs" => Rule::Fcfs,
            "sjf-prompt" => Rule::SjfPrompt,
            "hrrn" => Rule::Hrrn,
            "las" => Rule::Las,
            "mlfq" => Rule::Mlfq,
            "sjf-oracle" => Rule::SjfOracle,
            "srpt-oracle" => Rule::SrptOracle,
            "leap-frozen" => Rule::LeapFrozen,
            "leap-paper" => Rule::LeapPaper,
            "leap" => Rule::Leap,
            _ => match name.strip_prefix("score:") {
                Some(column) if !column.is_empty() => Rule::Score(column.to_owned()),
                _ => {
                    return Err(Error::Config(format!(
                        "unknown policy {name:?}; known are fcfs, sjf-prompt, hrrn, las, mlfq, sjf-oracle, srpt-oracle, \
                         leap-frozen, leap-paper, leap and score:NAME"
                    )));
                }
            },
        };
        let mut spec = Self { name: text.to_owned(), ..Self::of(rule) };
        for option in options.into_iter().flat_map(|options| options.split(',')) {
            let (key, value) = option
                .split_once('=')
                .ok_or_else(|| Error::Config(format!("policy {text}: expected key=value, got {option:?}")))?;
            spec.set(key, value)?;
        }
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_options_of_a_specification() {
        let spec: PolicySpec =
            "leap:levers=queue+evict,order=survival,objective=e2el,rls=off,aging_rate=0".parse().unwrap();
        assert_eq!(spec.levers, Levers { queue: true, evict: true, ..Levers::default() });
        assert_eq!((spec.order, spec.objective, spec.rls), (Order::Survival, Objective::E2el, false));
        assert_eq!(spec.clone().aged(Aging::PerSecond(0.3)).aging, Aging::PerSecond(0.0));
        let plain: PolicySpec = "leap".parse().unwrap();
        assert_eq!(plain.levers, Levers { queue: true, admission: true, ..Levers::default() });
        assert_eq!((plain.aging, plain.memory_weight, plain.rls), (Aging::PerWait(AGING), 1.0, true));
        assert_eq!(plain.aged(Aging::PerSecond(0.3)).aging, Aging::PerSecond(0.3));
        let fcfs: PolicySpec = "fcfs:levers=admission".parse().unwrap();
        assert_eq!(fcfs.levers, Levers { admission: true, ..Levers::default() });
        let score: PolicySpec = "score:bert:delay_s=0.02,gpu_share=0.1".parse().unwrap();
        assert_eq!((score.rule, score.delay_s), (Rule::Score("bert".into()), 0.02));
    }

    #[test]
    fn wrong_specifications_say_what_is_wrong() {
        for (text, part) in [
            ("sjf", "unknown policy"),
            ("leap:ageing=1", "unknown key ageing"),
            ("leap:aging=1,aging_rate=1", "exclude each other"),
            ("leap:recompute_share=0", "not a number from 0.0001"),
            ("leap:aging_rate", "expected key=value"),
            ("leap:aging_rate=-1", "not a number from 0"),
            ("leap:rls=maybe", "on or off"),
            ("fcfs:levers=queue", "order of its own"),
            ("sjf-prompt:order=gittins", "needs a policy with a readout"),
            ("leap:delay_s=1", "score:NAME"),
            ("score:", "unknown policy"),
        ] {
            let error = text.parse::<PolicySpec>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
