//! The order of one request: countdown, survival, Gittins.
