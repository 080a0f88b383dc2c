"""Lets torchvision's Python part load where its compiled part cannot: its wheels want CUDA's libraries.

SGLang imports torchvision for pictures, which the tests have none of. Two operators are declared, without code, since
torchvision describes them while it is imported. Read by every Python process that starts with this folder on its path.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class _BeforeTorchvision(MetaPathFinder):
    operators = None  # kept: they go with their library

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.operators is None:
            import torch

            self.operators = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
