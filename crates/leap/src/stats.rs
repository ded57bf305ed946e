//! Rank correlations, percentiles and intervals.
