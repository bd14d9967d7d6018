"""The gateway: the only way from a sandbox to the network. It decides on each program's request."""

from __future__ import annotations
