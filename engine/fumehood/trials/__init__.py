"""Trials: a program runs, and a human who has seen its effect lets it be put in."""
