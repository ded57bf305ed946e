"""Offline fit and evaluation of readouts."""
