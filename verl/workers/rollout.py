"""A rollout with weights of its own on one rank: it generates while the policy is trained elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from verl.errors import RolloutError
from verl.hybrid import OneDeviceHybrid
from verl.models.loading import load_tokenizer
from verl.models.policy import load_policy
from verl.single_controller import Dispatch, register
from verl.workers.generating import Generates
from verl.workers.settings import ActorSettings


class Rollout(Generates):
    """A copy of the policy that only generates. Its weights change when they are sent, and at no other time."""

    def __init__(self, settings: ActorSettings):
        self.settings = settings
        self.tokenizer = load_tokenizer(
            settings.tokenizer_path or settings.model.path,
            trust_remote_code=settings.model.trust_remote_code,
            chat_template=settings.chat_template,
        )
        self.model = load_policy(settings.model).requires_grad_(False)
        self.version = 0
        self.hybrid = OneDeviceHybrid(self.model, self._make_rollout_engine, lambda: self.version)
        self.conversations = self._make_conversations()
        self._weights = dict(self.model.named_parameters())

    @register(Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def load_weights(self, piece: Mapping[str, torch.Tensor]) -> None:
        """Write some weights, as :meth:`verl.workers.actor.Actor.weights` gives them, into the existing storages."""
        for name, tensor in piece.items():
            mine = self._weights.get(name)
            if mine is None or mine.shape != tensor.shape:
                raise RolloutError(f"The policy sent the weight {name} {tuple(tensor.shape)}, which the rollout lacks.")
            mine.copy_(tensor)

    @register(Dispatch.ONE_TO_ALL)
    def weights_changed(self) -> None:
        """All weights of a version are here."""
        self.version += 1

    @register(Dispatch.RANK_ZERO)
    def describe(self) -> dict[str, object]:
        """The engine, and the size of the vocabulary."""
        assert self.hybrid is not None
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        return {"rollout_engine": self.hybrid.engine_name, "vocabulary": vocabulary}
