"""Attacks on this host's own walls: a safe corpus, a runner, and a scorecard.

Host side, for `fumehood doctor --attack`. The command line uses this package, which uses the walls
of `sandbox` and the values of `core`. An attack run needs no running engine, and creates its own
walls.
"""
