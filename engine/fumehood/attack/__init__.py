"""Attacks on this host's own walls: a safe corpus, a runner, and a scorecard.

Host side, for `fumehood doctor --attack`. Above it the command line; below it the walls of
`sandbox` and the values of `core`. It needs no running engine and makes its own walls.
"""
