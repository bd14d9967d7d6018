"""Figures: metrics that parts of the engine report on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from fumehood.core.status import NodeRecord, NodeState


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric that a part of the engine reports. `name` is without `fumehood_` and `_total`."""

    name: str
    help: str
    value: float | Mapping[str, float]
    """The metric's value, or a mapping from each value of `label` to the metric's value for it."""
    label: str | None = None
    kind: Literal["gauge", "counter"] = "gauge"


def node_figures(nodes: Iterable[NodeRecord]) -> Iterator[Figure]:
    """Yield the metrics of a cluster's nodes."""
    shown, well = list(nodes), (NodeState.JOINED, NodeState.DRAINED)
    up = {node.name: float(node.state in well) for node in shown}
    yield Figure("node_up", "1 while a node serves, or is drained.", up, "node")
    for name, words in (
        ("slots", "Calls that a node can take at once."),
        ("used", "Slots of a node in use, also by other engines."),
        ("sessions", "Sessions on a node that are not stopped."),
    ):
        values = {node.name: float(getattr(node, name)) for node in shown}
        yield Figure(f"node_{name}", words, values, "node")
