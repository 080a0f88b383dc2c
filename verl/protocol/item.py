"""One row of a DataProto, and the process-wide switch of auto padding."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict


class DataProtoConfig:
    """Process-wide switch: with ``auto_padding`` (or VERL_AUTO_PADDING=1) ``chunk`` accepts any number of rows."""

    auto_padding: bool = os.environ.get("VERL_AUTO_PADDING", "").lower() in ("1", "true")


@dataclass
class DataProtoItem:
    """One row: ``batch`` holds tensors without the row dimension, ``non_tensor_batch`` the row's objects."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
