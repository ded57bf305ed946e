//! What a step decides, from plain numbers: tokens, blocks, keys, time. The replayer and the plugin ask here and turn the
//! answers into their own bookkeeping; nothing here knows either of them.

pub mod admission;
pub mod aging;
mod lengths;
mod margin;
