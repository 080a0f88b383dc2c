"""How an error in a node reaches the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.dataflow.node import Node
from verl.dataflow.rows import RowSet, some
from verl.errors import CrashError, DataflowError, VerlError

if TYPE_CHECKING:
    from verl.dataflow.graph import Step


class NodeError(DataflowError, CrashError):
    """A node raised something that is not a VerlError: a crash. ``__cause__`` is the original with its traceback."""


class Cancelled(Exception):
    """The step was cancelled while this node ran; never leaves the package."""


def blame(node: Step, rows: RowSet | None, error: BaseException) -> BaseException:
    """The error to raise for ``error`` of a node.

    Errors for people keep their type and their sentence and gain the place. Others are wrapped in a NodeError.
    KeyboardInterrupt and its kin pass as they are.
    """
    if not isinstance(error, Exception) or isinstance(error, Cancelled):
        return error
    name = f"{'node' if isinstance(node, Node) else 'loop'} {node.name!r}"
    place = f"{name} (frame {node.frame!r}{f', rows {some(rows.ids)}' if rows else ''})"
    if not isinstance(error, VerlError):
        wrapped = NodeError(f"{place} raised {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped
    if name not in str(error):
        text = f"{error} [in {place}]"
        error.args = (text, *error.args[1:])
        if isinstance(error, ImportError):  # its text is kept apart from args
            error.msg = text
    return error
