//! Priority queue with aging.
