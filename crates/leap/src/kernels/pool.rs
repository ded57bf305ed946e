//! Sums of half-precision rows.

use super::{Group, Kernel, Machine, WIDTH, dispatch};

/// Rows that go into the sums together, so that those are loaded and stored less often.
const TOGETHER: usize = 4;

/// A half-precision value as it lies in memory.
pub(crate) trait Bits: Copy {
    fn bits(self) -> u16;
}

impl Bits for u16 {
    #[inline(always)]
    fn bits(self) -> u16 {
        self
    }
}

/// Little-endian bytes, which need not be aligned.
impl Bits for [u8; 2] {
    #[inline(always)]
    fn bits(self) -> u16 {
        u16::from_le_bytes(self)
    }
}

/// sums[j] += value j of every row, in the order of the rows and in f64: the same on every machine. Rows are as long as
/// `sums`.
pub(crate) fn add_halves<'a, B: Bits + 'a>(rows: impl Iterator<Item = &'a [B]>, sums: &mut [f64]) {
    dispatch(AddHalves { rows, sums });
}

pub(super) struct AddHalves<'s, I> {
    pub rows: I,
    pub sums: &'s mut [f64],
}

impl<'a, B: Bits + 'a, I: Iterator<Item = &'a [B]>> Kernel for AddHalves<'_, I> {
    type Out = ();

    #[inline(always)]
    fn run<M: Machine>(mut self, machine: M) {
        let rows = &mut self.rows;
        while let Some(first) = rows.next() {
            match (rows.next(), rows.next(), rows.next()) {
                (Some(b), Some(c), Some(d)) => add::<M, B, TOGETHER>(machine, [first, b, c, d], self.sums),
                few => {
                    add(machine, [first], self.sums);
                    for row in [few.0, few.1, few.2].into_iter().flatten() {
                        add(machine, [row], self.sums);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn add<M: Machine, B: Bits, const R: usize>(machine: M, rows: [&[B]; R], sums: &mut [f64]) {
    let n = sums.len();
    let whole = n / WIDTH;
    let (groups, rest) = sums.as_chunks_mut::<WIDTH>();
    for (j, sum) in rest.iter_mut().enumerate() {
        for row in rows {
            *sum += f64::from(machine.halves(&[row[whole * WIDTH + j].bits(); WIDTH])[0]);
        }
    }
    let rows = rows.map(|row| &row[..n].as_chunks::<WIDTH>().0[..whole]);
    for c in 0..whole {
        let mut sum = groups[c];
        for row in rows {
            let bits: Group<u16> = row[c].map(B::bits);
            let values = machine.halves(&bits);
            for i in 0..WIDTH {
                sum[i] += f64::from(values[i]);
            }
        }
        groups[c] = sum;
    }
}
