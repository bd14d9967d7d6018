"""Attacks on this host's own walls: a safe corpus, a runner, and a scorecard.

Host side, for `fumehood doctor --attack`. The command line uses this package, which uses the walls
of `sandbox` and the values of `core`. A run of the attacks creates its own walls and needs no
running engine.
"""
