"""Replay of a trace: the leap-replay command and its report."""
