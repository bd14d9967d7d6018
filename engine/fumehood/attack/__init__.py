"""The host put to the test: a safe corpus of attacks run against its own walls, with a scorecard.

Host side, for `fumehood doctor --attack`. Above it the command line; below it the walls of
`sandbox` and the values of `model`. It needs no running engine and makes its own walls.
"""
