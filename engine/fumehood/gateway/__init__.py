"""The gateway (a part): the only way from a sandbox to the network. It decides on each request of a
program.
"""

from __future__ import annotations
