"""The gateway: the only way from a sandbox to the network. It judges each request of a program."""

from __future__ import annotations
