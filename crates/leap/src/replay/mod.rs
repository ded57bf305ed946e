//! Replay of a recorded trace through a step-level model of a continuous-batching engine.
