"""TensorBoard event files through the ``tensorboard`` package alone: neither torch nor TensorFlow is imported."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import MissingDependencyError
from verl.tracking.loggers.base import Logger, RunInfo
from verl.tracking.samples import crop


class TensorboardLogger(Logger):
    """Writes to ``$TENSORBOARD_DIR`` if it is set, else to ``<run folder>/tensorboard``.

    A resumed run tells TensorBoard to drop the points after the step it resumed from.
    """

    name = "tensorboard"

    def __init__(self, info: RunInfo):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingDependencyError("tensorboard", "trainer.logger=tensorboard") from None
        self._event, self._summary = event_pb2, summary_pb2
        self._tensor, self._shape = tensor_pb2, tensor_shape_pb2
        folder = os.environ.get("TENSORBOARD_DIR") or str(info.folder / "tensorboard")
        self._writer = EventFileWriter(folder, flush_secs=10)
        if info.resume_step:
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(info.resume_step + 1, session_log=started)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summary.Summary(value=values))

    def samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="text")
        )
        texts = [self._markdown(row).encode("utf-8", errors="backslashreplace") for row in rows]
        tensor = self._tensor.TensorProto(
            dtype="DT_STRING",
            string_val=texts,
            tensor_shape=self._shape.TensorShapeProto(dim=[self._shape.TensorShapeProto.Dim(size=len(texts))]),
        )
        value = self._summary.Summary.Value(tag="samples", metadata=metadata, tensor=tensor)
        self._add(step, summary=self._summary.Summary(value=[value]))

    @staticmethod
    def _markdown(row: Mapping[str, Any]) -> str:
        """One sample; indented by four spaces each text is a code block, so that nothing in it is formatted."""
        parts = [f"split {row.get('split')}, score {row.get('score')}"]
        for key in ("prompt", "response", "ground_truth"):
            if row.get(key) is not None:
                text = crop(str(row[key]), 4000).replace("\n", "\n    ")
                parts.append(f"{key}:\n\n    {text}")
        return "\n\n".join(parts)

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        self._writer.close()
