"""Decisions, and nothing else: no sockets, no event loop, no clock, no randomness, no logging."""
