"""Walls made of processes on this host: the interpreter."""
