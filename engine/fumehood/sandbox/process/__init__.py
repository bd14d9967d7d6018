"""Walls made of processes on this host: the interpreter, the jail, and workers for functions."""
