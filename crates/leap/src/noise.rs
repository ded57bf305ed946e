//! How far true lengths fall from predicted ones, by level of the prediction, learned online.
