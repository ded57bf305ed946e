//! A linear layer that reads an output length from features.
