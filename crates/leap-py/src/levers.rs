use crate::error::to_py;
use leap::levers::{Active, Candidate, Claim, Class, Rules};
use pyo3::prelude::*;

#[pyclass(module = "leap_rs._leap")]
struct Evictor {
    inner: leap::levers::Evictor,
}

#[pymethods]
impl Evictor {
    #[new]
    fn new(factor: f64, per_s: f64) -> Self {
        Self { inner: leap::levers::Evictor::new(factor, per_s) }
    }

    #[getter]
    fn evicted(&self) -> u64 {
        self.inner.evicted()
    }

    fn ready(&self, now_s: f64) -> bool {
        self.inner.ready(now_s)
    }

    #[pyo3(signature = (residents, *, key, blocks, seat, free_blocks, now_s))]
    fn victims(
        &mut self,
        residents: Vec<(f64, u64, usize)>,
        key: f64,
        blocks: usize,
        seat: bool,
        free_blocks: usize,
        now_s: f64,
    ) -> Vec<usize> {
        let claim = Claim { key, blocks, seat };
        let candidates: Vec<Candidate> = residents.iter().map(|&(key, number, _)| Candidate { key, number }).collect();
        self.inner.victims(&claim, &candidates, |i| residents[i].2, free_blocks, now_s)
    }
}

/// Order, who is passed over, contenders, and how many the wait cap has put first.
type Plan = (Vec<u32>, Vec<u32>, Vec<u32>, usize);

#[pyclass(module = "leap_rs._leap")]
struct Planner {
    inner: leap::levers::Planner,
    /// The residents that were last looked at, without what their keys are made of.
    residents: Vec<Active>,
}

#[pymethods]
impl Planner {
    #[new]
    #[pyo3(signature = (*, slots, step_tokens, block_size, groups, max_adapters, hysteresis, wait_cap_steps))]
    fn new(
        slots: usize,
        step_tokens: usize,
        block_size: usize,
        groups: usize,
        max_adapters: Option<usize>,
        hysteresis: f64,
        wait_cap_steps: Option<u32>,
    ) -> Self {
        let rules = Rules { slots, step_tokens, block_size, groups, max_adapters, hysteresis, wait_cap_steps };
        Self { inner: leap::levers::Planner::new(&rules), residents: Vec::new() }
    }

    fn look(&mut self, residents: usize, free_blocks: usize) -> bool {
        self.inner.look(residents, free_blocks)
    }

    #[pyo3(signature = (numbers, classes, adapters = None))]
    fn wants_keys(&mut self, numbers: Vec<u64>, classes: &[u8], adapters: Option<Vec<Option<u64>>>) -> PyResult<bool> {
        let adapters = adapters.unwrap_or_else(|| vec![None; numbers.len()]);
        same_length(numbers.len(), classes.len(), adapters.len())?;
        self.residents.clear();
        for ((number, &class), adapter) in numbers.into_iter().zip(classes).zip(adapters) {
            let class = class_of(class)?;
            self.residents.push(Active { number, class, adapter, ln_remaining: 0.0, aged: 0.0 });
        }
        Ok(self.inner.wants_keys(&self.residents))
    }

    #[pyo3(signature = (ln_remaining = None, aged = None))]
    fn plan(&mut self, ln_remaining: Option<Vec<f64>>, aged: Option<Vec<f64>>) -> PyResult<Plan> {
        self.set_keys(ln_remaining, aged)?;
        let plan = self.inner.plan(&self.residents);
        Ok((plan.order, plan.gated, plan.contenders, plan.promoted))
    }

    fn scheduled(&mut self, got: Vec<bool>) {
        self.inner.scheduled(&got);
    }

    #[pyo3(signature = (ln_remaining = None, aged = None))]
    fn settle(&mut self, ln_remaining: Option<Vec<f64>>, aged: Option<Vec<f64>>) -> PyResult<Vec<u32>> {
        self.set_keys(ln_remaining, aged)?;
        Ok(self.inner.settle(&self.residents))
    }
}

impl Planner {
    fn set_keys(&mut self, ln_remaining: Option<Vec<f64>>, aged: Option<Vec<f64>>) -> PyResult<()> {
        let (Some(ln_remaining), Some(aged)) = (ln_remaining, aged) else { return Ok(()) };
        same_length(self.residents.len(), ln_remaining.len(), aged.len())?;
        for ((resident, ln), aged) in self.residents.iter_mut().zip(ln_remaining).zip(aged) {
            (resident.ln_remaining, resident.aged) = (ln, aged);
        }
        Ok(())
    }
}

fn class_of(class: u8) -> PyResult<Class> {
    match class {
        0 => Ok(Class::Idle),
        1 => Ok(Class::Decoding),
        2 => Ok(Class::Prefilling),
        _ => Err(to_py(leap::Error::Config(format!("class of a resident: expected 0, 1 or 2, got {class}")))),
    }
}

fn same_length(a: usize, b: usize, c: usize) -> PyResult<()> {
    if a == b && a == c { Ok(()) } else { Err(to_py(leap::Error::Config(format!("lengths differ: {a}, {b} and {c}")))) }
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Evictor>()?;
    m.add_class::<Planner>()
}
