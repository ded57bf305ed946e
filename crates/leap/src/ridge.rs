//! Fit a readout: normal equations, streaming.
