"""RayDPOTrainer: RayPPOTrainer's config dict and ``fit()``, for learning from pairs."""

from __future__ import annotations

from typing import ClassVar

from verl.api.ray_trainer import RayPPOTrainer


class RayDPOTrainer(RayPPOTrainer):
    """As :class:`verl.RayPPOTrainer`, with ``algorithm.name`` ``dpo`` unless the config names another one.

    The data have the columns prompt, chosen and rejected. Data without pairs, in a config with a reward function or a
    reward model, make it online DPO: pairs are the best and the worst of the policy's own answers.
    ``algorithm.kl_penalty`` as a number is ``preference.beta``; ``gamma`` and ``lam`` are told to be unused.

    Raises:
        ConfigError, DataError: with everything that is wrong, before a model is loaded.
    """

    defaults: ClassVar[dict[str, object]] = {"algorithm.name": "dpo"}
