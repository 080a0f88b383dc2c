"""The dataflow of a step: nodes that declare what they need, give, read and write, and executors that run them.

- ``node.py``         Node, keys, frames, relations
- ``graph.py``        edges, order, what can be streamed; ``check_graph.py``: everything that can be wrong
- ``rows.py``         the columns of a step, joined by id; ``checks.py``: what a node returned
- ``executor.py``     calling nodes, barriers, the serial executor; ``stream.py``: the concurrent one
- ``failures.py``     how an error in a node reaches the caller
- ``loop.py``         run a flow again and again within a step
- ``ahead.py``        OneStepOff: the first half of the next step beside the second half of this one
- ``flow.py``         Dataflow; ``flowset.py``: the named flows of a run; ``describe.py``: table and Mermaid

``HybridDataflow`` is the user's door, under the name by which the documents import it. It builds on the trainer, far
above this room, so it is looked up only when asked for; nothing in this room uses it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from verl.dataflow.ahead import OneStepOff
from verl.dataflow.executor import StepResult
from verl.dataflow.failures import NodeError
from verl.dataflow.flow import Dataflow
from verl.dataflow.flowset import FlowSet
from verl.dataflow.loop import Loop
from verl.dataflow.node import Key, Node, Relation, aggregate, expand, pair, same, subset

if TYPE_CHECKING:
    from verl.api.hybrid_dataflow import HybridDataflow

__all__ = [
    "Dataflow",
    "FlowSet",
    "HybridDataflow",
    "Key",
    "Loop",
    "Node",
    "NodeError",
    "OneStepOff",
    "Relation",
    "StepResult",
    "aggregate",
    "expand",
    "pair",
    "same",
    "subset",
]

_DOORS = {"HybridDataflow": "verl.api.hybrid_dataflow"}


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_DOORS[name]), name)
