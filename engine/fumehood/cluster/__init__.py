"""Containers on many machines: nodes, the placement of calls, and the wall that uses the nodes."""
