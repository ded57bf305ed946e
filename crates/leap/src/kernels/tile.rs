//! Products of a few vectors with a block of rows, a strip of rows at a time: a strip stays in the cache between its two
//! uses, so that the block comes from memory once.

use super::{Kernel, Machine, Scalar, WIDTH, dispatch};

/// Rows in a strip.
const STRIP: usize = 4;
/// Vectors that go through a strip together.
const TOGETHER: usize = 4;

/// A tile of a symmetric matrix: `values` (rows x columns, row by row), the first of which is at (`row`, `column`).
pub(crate) struct Tile<'a, T> {
    pub values: &'a [T],
    pub row: usize,
    pub column: usize,
    pub columns: usize,
}

/// out += u A for what the tile holds of A: the block itself and, off the diagonal, its transpose. `u` and `out` are
/// (k, n).
pub(crate) fn multiply<T: Scalar>(tile: &Tile<T>, n: usize, u: &[T], out: &mut [T]) {
    let &Tile { values, row, column, columns } = tile;
    dispatch(Strips { rows: values, columns, column, part: Part::Tile { row }, n, u, out });
}

/// out -= (u W') W for the rows W (any number, n). `u` and `out` are (k, n).
pub(crate) fn deflate<T: Scalar>(rows: &[T], n: usize, u: &[T], out: &mut [T]) {
    dispatch(Strips { rows, columns: n, column: 0, part: Part::Rows, n, u, out });
}

#[derive(Clone, Copy)]
pub(super) enum Part {
    /// Of a symmetric matrix, from this row on.
    Tile {
        row: usize,
    },
    Rows,
}

pub(super) struct Strips<'a, T> {
    pub rows: &'a [T],
    pub columns: usize,
    pub column: usize,
    pub part: Part,
    pub n: usize,
    pub u: &'a [T],
    pub out: &'a mut [T],
}

impl<T: Scalar> Kernel for Strips<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<M: Machine>(mut self, machine: M) {
        let columns = self.columns;
        for (s, strip) in self.rows.chunks(STRIP * columns).enumerate() {
            if strip.len() == STRIP * columns {
                let t: [&[T]; STRIP] = std::array::from_fn(|i| &strip[i * columns..][..columns]);
                self.strip(machine, s * STRIP, t);
            } else {
                for (i, t) in strip.chunks_exact(columns).enumerate() {
                    self.strip(machine, s * STRIP + i, [t]);
                }
            }
        }
    }
}

impl<T: Scalar> Strips<'_, T> {
    #[inline(always)]
    fn strip<M: Machine, const R: usize>(&mut self, machine: M, first: usize, t: [&[T]; R]) {
        let k = self.u.len() / self.n;
        let together = k - k % TOGETHER;
        for a in (0..together).step_by(TOGETHER) {
            let u: [&[T]; TOGETHER] = std::array::from_fn(|j| &self.u[(a + j) * self.n..][..self.n]);
            let (out, last) = self.out[a * self.n..][..TOGETHER * self.n].split_at_mut(2 * self.n);
            let ((o0, o1), (o2, o3)) = (out.split_at_mut(self.n), last.split_at_mut(self.n));
            through(machine, self.part, first, self.column, t, u, [o0, o1, o2, o3]);
        }
        for a in together..k {
            let one = a * self.n..(a + 1) * self.n;
            through(machine, self.part, first, self.column, t, [&self.u[one.clone()]], [&mut self.out[one]]);
        }
    }
}

/// Rows `t`, the first of which is number `first`, with vectors `u` into `out`.
#[inline(always)]
fn through<M: Machine, T: Scalar, const R: usize, const K: usize>(
    machine: M,
    part: Part,
    first: usize,
    column: usize,
    t: [&[T]; R],
    u: [&[T]; K],
    mut out: [&mut [T]; K],
) {
    let columns = t[0].len();
    let across = u.map(|u| &u[column..][..columns]);
    let by: [[T; R]; K] = match part {
        Part::Rows => {
            let mut sums = dots(machine, t, across);
            sums.as_flattened_mut().iter_mut().for_each(|s| *s = T::ZERO - *s);
            sums
        }
        Part::Tile { row } => {
            if row != column {
                let sums = dots(machine, t, across);
                for (out, sums) in out.iter_mut().zip(sums) {
                    out[row + first..][..R].iter_mut().zip(sums).for_each(|(o, s)| *o = *o + s);
                }
            }
            u.map(|u| std::array::from_fn(|i| u[row + first + i]))
        }
    };
    combine(machine, t, by, out.map(|o| &mut o[column..][..columns]));
}

/// The dot product of every row of `t` with every vector of `u`, all of one length.
#[inline(always)]
fn dots<M: Machine, T: Scalar, const R: usize, const K: usize>(machine: M, t: [&[T]; R], u: [&[T]; K]) -> [[T; R]; K] {
    let mut out = [[T::ZERO; R]; K];
    // Two rows at a time, or all where there is one vector: as many sums as registers hold, and enough to hide latency.
    for i in (0..R).step_by(2) {
        if R > i + 1 {
            let sums = dots_of(machine, [t[i], t[i + 1]], u);
            for j in 0..K {
                [out[j][i], out[j][i + 1]] = sums[j];
            }
        } else {
            let sums = dots_of(machine, [t[i]], u);
            for j in 0..K {
                [out[j][i]] = sums[j];
            }
        }
    }
    out
}

#[inline(always)]
fn dots_of<M: Machine, T: Scalar, const R: usize, const K: usize>(
    machine: M,
    t: [&[T]; R],
    u: [&[T]; K],
) -> [[T; R]; K] {
    let n = t[0].len();
    let whole = n / WIDTH;
    let t_groups = t.map(|t| &t.as_chunks::<WIDTH>().0[..whole]);
    let u_groups = u.map(|u| &u.as_chunks::<WIDTH>().0[..whole]);
    let mut groups = [[[T::ZERO; WIDTH]; R]; K];
    for c in 0..whole {
        for j in 0..K {
            for i in 0..R {
                groups[j][i] = machine.multiply_add(t_groups[i][c], u_groups[j][c], groups[j][i]);
            }
        }
    }
    // No closures over the sums from here on: one that is not inlined would keep them in memory.
    let mut sums = [[T::ZERO; R]; K];
    for j in 0..K {
        for i in 0..R {
            let [a, b, c, d, e, f, g, h] = groups[j][i];
            let mut sum = ((a + e) + (b + f)) + ((c + g) + (d + h));
            for c in whole * WIDTH..n {
                sum = sum + t[i][c] * u[j][c];
            }
            sums[j][i] = sum;
        }
    }
    sums
}

/// out[j] += the sum of by[j][i] * t[i] over i, all of one length.
#[inline(always)]
fn combine<M: Machine, T: Scalar, const R: usize, const K: usize>(
    machine: M,
    t: [&[T]; R],
    by: [[T; R]; K],
    out: [&mut [T]; K],
) {
    let n = t[0].len();
    let whole = n / WIDTH;
    let t_groups = t.map(|t| &t.as_chunks::<WIDTH>().0[..whole]);
    let mut out = out.into_iter().zip(by);
    while let Some((first, by_first)) = out.next() {
        let (first, rest) = first[..n].as_chunks_mut::<WIDTH>();
        tail(rest, t, by_first);
        let first = &mut first[..whole];
        // Two at a time, as many as leave room in registers for the factors.
        if let Some((second, by_second)) = out.next() {
            let (second, rest) = second[..n].as_chunks_mut::<WIDTH>();
            tail(rest, t, by_second);
            let second = &mut second[..whole];
            for c in 0..whole {
                let mut sums = [first[c], second[c]];
                for i in 0..R {
                    sums[0] = machine.multiply_add([by_first[i]; WIDTH], t_groups[i][c], sums[0]);
                    sums[1] = machine.multiply_add([by_second[i]; WIDTH], t_groups[i][c], sums[1]);
                }
                [first[c], second[c]] = sums;
            }
        } else {
            for c in 0..whole {
                for i in 0..R {
                    first[c] = machine.multiply_add([by_first[i]; WIDTH], t_groups[i][c], first[c]);
                }
            }
        }
    }
}

/// The last columns, fewer than a group.
#[inline(always)]
fn tail<T: Scalar, const R: usize>(out: &mut [T], t: [&[T]; R], by: [T; R]) {
    let from = t[0].len() - out.len();
    for i in 0..R {
        out.iter_mut().zip(&t[i][from..]).for_each(|(o, &t)| *o = *o + by[i] * t);
    }
}
