//! Which residents decode next.
