"""Verbs: the way of one call, one file a stage, read in the order of `spine`."""
