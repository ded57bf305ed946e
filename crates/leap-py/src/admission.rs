use crate::error::to_py;
use crate::order::PyRemainingTable;
use leap::levers::admission::{KvGrowth, RECOMPUTE_SHARE, Request};
use leap::levers::aging::{AGING, Aging, Arrival};
use pyo3::prelude::*;
use std::sync::Arc;

#[pyclass(module = "leap_rs._leap")]
struct Admission {
    inner: leap::levers::admission::Admission,
}

fn request(prompt: u32, cap: u32, shared_blocks: u32, table: Option<&PyRemainingTable>) -> Request {
    Request { prompt, cap, shared_blocks, length: table.map(|table| Arc::clone(table.inner.length())) }
}

#[pymethods]
impl Admission {
    #[new]
    fn new(groups: Vec<(u32, Option<u32>)>, usable_blocks: u32, recompute_share: f64) -> PyResult<Self> {
        let growth = KvGrowth::of_groups(groups);
        let inner = leap::levers::admission::Admission::new(growth, usable_blocks, recompute_share);
        Ok(Self { inner: inner.map_err(to_py)? })
    }

    #[pyo3(signature = (id, *, prompt, cap, shared_blocks, table))]
    fn admitted(&mut self, id: u64, prompt: u32, cap: u32, shared_blocks: u32, table: Option<&PyRemainingTable>) {
        self.inner.admitted(id, request(prompt, cap, shared_blocks, table));
    }

    fn left(&mut self, id: u64) {
        self.inner.left(id);
    }

    fn preempted(&mut self, id: u64) {
        self.inner.preempted(id);
    }

    fn learned(&mut self, id: u64, table: Option<&PyRemainingTable>) {
        self.inner.learned(id, table.map(|table| Arc::clone(table.inner.length())));
    }

    fn finished(&mut self, tokens: u32) {
        self.inner.finished(tokens);
    }

    fn progressed(&mut self, ids: Vec<u64>, generated: Vec<u32>) -> PyResult<()> {
        if ids.len() != generated.len() {
            let text = format!("progressed: {} ids and {} numbers of tokens", ids.len(), generated.len());
            return Err(to_py(leap::Error::Config(text)));
        }
        ids.iter().zip(&generated).for_each(|(&id, &generated)| self.inner.progressed(id, generated));
        Ok(())
    }

    #[pyo3(signature = (*, prompt, generated, cap, shared_blocks, table))]
    fn has_room(
        &mut self,
        prompt: u32,
        generated: u32,
        cap: u32,
        shared_blocks: u32,
        table: Option<&PyRemainingTable>,
    ) -> bool {
        self.inner.has_room(&request(prompt, cap, shared_blocks, table), generated)
    }

    fn held(&mut self) {
        self.inner.held();
    }

    fn stepped(&mut self, computed: u64, recomputed: u64) {
        self.inner.stepped(computed, recomputed, 1);
    }

    #[getter]
    fn holds(&self) -> u64 {
        self.inner.holds()
    }

    #[getter]
    fn z(&self) -> f64 {
        self.inner.z()
    }

    #[getter]
    fn peak_ratio(&self) -> Option<f64> {
        self.inner.peak_ratio()
    }
}

#[pyclass(module = "leap_rs._leap")]
struct AgingClock {
    inner: leap::levers::aging::AgingClock,
}

#[pymethods]
impl AgingClock {
    #[new]
    #[pyo3(signature = (*, per_wait = None, per_second = None))]
    fn new(per_wait: Option<f64>, per_second: Option<f64>) -> PyResult<Self> {
        let aging = match (per_wait, per_second) {
            (Some(alpha), None) => Aging::PerWait(alpha),
            (None, Some(rate)) => Aging::PerSecond(rate),
            _ => return Err(to_py(leap::Error::Config("expected either per_wait or per_second".into()))),
        };
        Ok(Self { inner: leap::levers::aging::AgingClock::new(aging).map_err(to_py)? })
    }

    fn at(&self, time_s: f64) -> f64 {
        self.inner.at(time_s)
    }

    fn arrival(&self, time_s: f64) -> (f64, f64) {
        let Arrival { aged, mean_tokens } = self.inner.arrival(time_s);
        (aged, mean_tokens)
    }

    fn finished(&mut self, tokens: Option<u32>) {
        self.inner.finished(tokens);
    }

    fn step(&mut self, now_s: f64, waiting: u64) {
        self.inner.step(now_s, waiting);
    }

    #[pyo3(signature = (ln_remaining, mean_tokens, *, squared))]
    fn boosted(&self, ln_remaining: Vec<f64>, mean_tokens: Vec<f64>, squared: bool) -> PyResult<Vec<f64>> {
        if ln_remaining.len() != mean_tokens.len() {
            let text = format!("boosted: {} lengths and {} means", ln_remaining.len(), mean_tokens.len());
            return Err(to_py(leap::Error::Config(text)));
        }
        let one = |(ln, mean_tokens): (f64, f64)| {
            let arrival = Arrival { aged: 0.0, mean_tokens };
            self.inner.boosted(ln.exp(), arrival, squared).ln()
        };
        Ok(ln_remaining.into_iter().zip(mean_tokens).map(one).collect())
    }
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("DEFAULT_AGING", AGING)?;
    m.add("DEFAULT_RECOMPUTE_SHARE", RECOMPUTE_SHARE)?;
    m.add_class::<Admission>()?;
    m.add_class::<AgingClock>()
}
