"""Containers on many machines: nodes, placing, and the wall in front of them."""
