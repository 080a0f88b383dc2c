"""Loss scaling for float16: gradients are computed of scale x loss, so that small ones do not become zero.

Where the scaled gradient overflows, the step is taken again with a lower scale, so no data is lost and the result is
that of a lower scale from the start.
"""

from __future__ import annotations

import torch

INITIAL = 2.0**16
HIGHEST = 2.0**24
GROWTH_INTERVAL = 200  # optimizer steps without an overflow after which the scale doubles
BACKOFF = 16.0


class LossScaler:
    """A dynamic scale. Powers of two, so that scaling itself costs no precision."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.scale = INITIAL if enabled else 1.0
        self.good_steps = 0

    def lower(self) -> bool:
        """After an overflow: try again with a lower scale. False if there is none, so that scaling is not to blame."""
        if self.scale <= 1.0:
            return False
        self.scale = max(1.0, self.scale / BACKOFF)
        self.good_steps = 0
        return True

    def step_succeeded(self) -> None:
        if not self.enabled:
            return
        self.good_steps += 1
        if self.good_steps % GROWTH_INTERVAL == 0:
            self.scale = min(HIGHEST, self.scale * 2)

    def state(self) -> torch.Tensor:
        """(2,) scale and number of good steps; zeros from a run that scales nothing."""
        return torch.tensor([self.scale, self.good_steps] if self.enabled else [0.0, 0.0], dtype=torch.float64)

    def load(self, state: torch.Tensor) -> None:
        """Take a :meth:`state` over, if both that run and this one scale losses.

        A run that did not may also have written scale 1 and no good step.
        """
        scale, good_steps = float(state[0]), int(state[1])
        if self.enabled and (scale > 1.0 or good_steps > 0):
            self.scale, self.good_steps = scale, good_steps
