//! Prompt features: pooling of projected input embeddings.
