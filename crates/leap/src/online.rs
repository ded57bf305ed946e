//! A readout that learns: predict, learn, publish.
