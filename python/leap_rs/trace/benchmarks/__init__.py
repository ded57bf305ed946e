"""Readers of what benchmark tools write of each request they sent: the traffic as a trace, with the times they measured."""
