"""Trials (a part): a program runs, but its effect is held back until a human has seen and approved
it.
"""
