//! Anchored recursive least squares.
