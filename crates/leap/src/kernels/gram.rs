//! Products of many rows with themselves, from panels: the columns of the rows, a group at a time, so that what a block
//! of the result needs lies together.

use super::{Group, Kernel, Machine, Scalar, WIDTH, dispatch};

/// Rows of the result that are summed together, in [`PANELS`] panels: half of the registers of AVX2.
const HEIGHT: usize = 4;
const PANELS: usize = 2;

/// The rows (k, n) of X in panels: column group p of row i is `groups[p * k + i]`, padded with zeros.
pub(crate) struct Panels<T> {
    k: usize,
    groups: Vec<Group<T>>,
}

impl<T: Scalar> Panels<T> {
    pub fn new(rows: &[T], n: usize) -> Self {
        let k = rows.len() / n;
        // One more panel than there are columns, so that they can be taken in pairs.
        let mut groups = vec![[T::ZERO; WIDTH]; (n.div_ceil(WIDTH) + 1) * k];
        for (i, row) in rows.chunks_exact(n).enumerate() {
            for (p, values) in row.chunks(WIDTH).enumerate() {
                groups[p * k + i][..values.len()].copy_from_slice(values);
            }
        }
        Self { k, groups }
    }

    /// tile = beta tile + alpha X'X for a tile of X'X (row by row) that starts at (`row`, `column`), both multiples of 8.
    pub fn add_gram(&self, alpha: T, beta: T, row: usize, column: usize, columns: usize, tile: &mut [T]) {
        dispatch(AddGram { panels: self, alpha, beta, row, column, columns, tile });
    }

    fn panel(&self, first: usize) -> &[Group<T>] {
        &self.groups[first / WIDTH * self.k..][..self.k]
    }
}

pub(super) struct AddGram<'a, T> {
    pub panels: &'a Panels<T>,
    pub alpha: T,
    pub beta: T,
    pub row: usize,
    pub column: usize,
    pub columns: usize,
    pub tile: &'a mut [T],
}

impl<T: Scalar> Kernel for AddGram<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<M: Machine>(self, machine: M) {
        let Self { panels, alpha, beta, row, column, columns, tile } = self;
        for c in (0..columns).step_by(PANELS * WIDTH) {
            let right = [panels.panel(column + c), panels.panel(column + c + WIDTH)];
            for (s, strip) in tile.chunks_mut(HEIGHT * columns).enumerate() {
                let r = row + s * HEIGHT;
                let sums = block(machine, panels.panel(r), r % WIDTH, right);
                for (out, sums) in strip.chunks_mut(columns).zip(sums) {
                    let out = &mut out[c..];
                    let width = out.len().min(PANELS * WIDTH);
                    for (o, &s) in out[..width].iter_mut().zip(sums.as_flattened()) {
                        *o = beta * *o + alpha * s;
                    }
                }
            }
        }
    }
}

/// Sums over k of `left[k][from + i] * right[j][k]`, a row of groups for every i; `from` is 0 or 4.
#[inline(always)]
fn block<M: Machine, T: Scalar>(
    machine: M,
    left: &[Group<T>],
    from: usize,
    right: [&[Group<T>]; PANELS],
) -> [[Group<T>; PANELS]; HEIGHT] {
    let k = left.len();
    // Says to the compiler that `from + i` is inside a group.
    let from = if from < HEIGHT { 0 } else { HEIGHT };
    let right = [&right[0][..k], &right[1][..k]];
    let mut sums = [[[T::ZERO; WIDTH]; PANELS]; HEIGHT];
    for (at, left) in left.iter().enumerate() {
        for i in 0..HEIGHT {
            for j in 0..PANELS {
                sums[i][j] = machine.multiply_add([left[from + i]; WIDTH], right[j][at], sums[i][j]);
            }
        }
    }
    sums
}
