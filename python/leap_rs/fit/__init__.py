"""Offline fit and evaluation of readouts: the `leap-fit` command and the functions behind it."""
