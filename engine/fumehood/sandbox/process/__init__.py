"""Walls that run programs in processes on this host: the interpreter and the jail."""
