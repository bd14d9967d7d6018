"""Trials: a program runs, and its effect is applied only after a human has seen and approved it."""
