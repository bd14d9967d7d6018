"""Frozen values that every other package uses: tools, calls, envelopes, errors, limits, events.

The package also defines the values of sessions and workspaces, which walls, storage and clients
share. Invariant: no I/O, no clock, no randomness, and no import from any other package.
"""
