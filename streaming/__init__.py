"""The core of Hark: pure, synchronous objects from audio bytes to transcript events.

Nothing in this package awaits, reads a clock, opens a socket or loads a model: data goes in, a list of
outputs comes back. The shell in ``app`` does the rest.
"""
