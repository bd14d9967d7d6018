"""Attacks on this host's own walls: a safe corpus, a runner, and a scorecard.

Host side, for `fumehood doctor --attack`. Above it is the command line; below it are the walls of
`sandbox` and the values of `core`. It needs no running engine and creates its own walls.
"""
