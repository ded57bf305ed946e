use leap::levers::{Candidate, Claim};
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

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Evictor>()
}
