//! How a policy is spelled: `NAME[:key=value,...]`.

use std::fmt;
use std::str::FromStr;

use super::{Levers, PolicySpec, ReadoutSet, Rule};
use crate::levers::aging::Aging;
use crate::{Error, Result};

impl PolicySpec {
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
            "readouts" => {
                needs(self.rule == Rule::Leap, "the policy leap")?;
                let mut readouts = ReadoutSet::default();
                for kind in value.split('+') {
                    let kind = kind.parse().map_err(|_| wrong("readouts joined by +, of prompt, text and state"))?;
                    readouts.put(kind, true);
                }
                self.readouts = readouts;
                self.readouts_given = true;
            }
            "encoder_s" => {
                needs(self.rule == Rule::Leap, "the policy leap")?;
                self.encoder_s = number(0.0, 1e6)?;
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
                    "policy {}: unknown key {key}; known are levers, readouts, encoder_s, order, objective, rls, \
                     batch, aging, aging_rate, memory_weight, recompute_share, wait_cap_steps, wait_cap_s, hysteresis, \
                     evict_factor, evict_per_s, delay_s and gpu_share",
                    self.name
                )));
            }
        }
        Ok(())
    }

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
    use crate::levers::aging::AGING;
    use crate::remaining::{Objective, Order};

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
        let text: PolicySpec = "leap:readouts=text+prompt,encoder_s=0.5".parse().unwrap();
        assert_eq!(text.readouts, ReadoutSet { prompt: true, text: true, state: false });
        assert_eq!(text.encoder_s, 0.5);
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
            ("leap:readouts=", "of prompt, text and state"),
            ("leap:readouts=text+all", "readouts=text+all is not readouts joined by +"),
            ("leap-paper:readouts=text", "readouts needs the policy leap"),
            ("score:x:encoder_s=1", "encoder_s needs the policy leap"),
            ("leap:encoder_s=-0.1", "not a number from 0"),
            ("score:", "unknown policy"),
        ] {
            let error = text.parse::<PolicySpec>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
