"""wrap_for_rl: a Hugging Face model object gains rollouts, updates and a KL; its class and weights stay its own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from verl.algorithms.masked import as_mask
from verl.algorithms.rewards_shaping import last_token
from verl.api.adapter import check_model, choose, frozen_copy, make_config, make_roles, plain_model, tokenizer_of
from verl.api.reward_models import RewardModel
from verl.api.settings import is_reward_model
from verl.config import Config, needs_reference, resolve
from verl.dataflow import Dataflow
from verl.errors import ConfigError, DataError, RewardError
from verl.hybrid import make_twin
from verl.models.loading import building_models
from verl.models.lora import adapters_off, has_adapters
from verl.notices import notice
from verl.protocol import DataProto, object_column
from verl.rewards import RewardRunner
from verl.rollout.base import SamplingParams
from verl.trainer.ppo import update_half
from verl.trainer.ppo.keys import ROLLOUT, STATE
from verl.trainer.roles import Roles

METHODS = ("verl_rollout", "verl_update", "forward_with_kl", "generate_with_value", "shard_for_hybrid")


class RLMethods:
    """The methods that a wrapped model gains. B rows, P prompt, R response and T = P + R tokens."""

    def __init__(self, model: PreTrainedModel, reference: PreTrainedModel | None, config: Config, parts: _Parts):
        self._model, self._reference, self._config, self._parts = model, reference, config, parts
        self._plain = plain_model(model)
        self._roles: Roles | None = None
        self._plain_reference: PreTrainedModel | None = None
        self._rollouts = 0
        self._steps = 0

    def verl_rollout(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int = 64,
        *,
        n: int = 1,
        **sampling: Any,
    ) -> DataProto:
        """Sample ``n`` responses to every prompt.

        Args:
            input_ids: (B, P) prompts. attention_mask: (B, P), 1 for real tokens (padding may be on either side).
            sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``stop``, ``stop_token_ids``, ``ignore_eos``.

        Returns:
            B * n rows: ``sequences`` (also ``input_ids``) (B*n, T), ``prompts``, ``responses`` (B*n, R) right-padded,
            ``response_mask``, ``attention_mask``, ``rollout_log_probs`` (B*n, R) of the sampled tokens.
        """
        self._rollouts += 1
        prompts = _prompt_batch(input_ids, attention_mask, prefix=f"w{self._rollouts}.")
        params = SamplingParams(max_tokens=max_new_tokens, **sampling)
        pieces = DataProto.concat(list(self._made_roles().generate(prompts, n=n, sampling=params)))
        place = {sample: i for i, sample in enumerate(pieces.non_tensor_batch["sample_id"])}
        order = [place[f"{uid}/{k}"] for uid in prompts.non_tensor_batch["uid"] for k in range(n)]
        batch = pieces.select_idxs(np.array(order))
        batch.batch["sequences"] = batch.batch["input_ids"]
        batch.meta_info["temperature"] = params.temperature or 1.0
        return batch

    def verl_update(self, batch: DataProto, rewards: torch.Tensor | Sequence[float] | None = None) -> dict[str, float]:
        """One PPO step on a batch of :meth:`verl_rollout`; the model's own weights are written.

        Args:
            rewards: (B,) one number a row; None: what ``reward_fn`` gives.

        Returns:
            The step's metrics under verl's names. Raises RewardError without rewards, or for a wrong number of them.
        """
        roles = self._made_roles()
        scored = self._scored(batch, rewards)
        config = resolve(self._config)
        config.data.train_batch_size = len(set(batch.non_tensor_batch["uid"]))
        for role in (config.actor_rollout_ref.actor, config.critic):
            role.ppo_mini_batch_size = min(
                self._mini_batch or config.data.train_batch_size, config.data.train_batch_size
            )
        self._use_temperature(roles, batch.meta_info.get("temperature", 1.0))
        keys = {"sample": [*ROLLOUT, "token_level_scores", "score_valid"]}
        flow = Dataflow(*update_half(roles, config), inputs=keys, state=STATE, outputs=["advantages", "returns"])
        self._steps += 1
        return flow.run(scored, self._steps, "serial").metrics.results()

    def forward_with_kl(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> ModelOutput:
        """The model's own forward, with ``.kl`` (B, T): at each position the KL(model, reference) of the next token.

        Exact (over the whole vocabulary) and differentiable; 0 at masked positions.
        Raises ConfigError where the model was wrapped without a KL penalty.
        """
        base_is_reference = self._reference is None and has_adapters(self._plain) and needs_reference(self._config)
        if self._reference is None and not base_is_reference:
            raise ConfigError("forward_with_kl needs a reference: wrap_for_rl(model, enable_kl_penalty=True)")
        if self._plain_reference is None:
            with building_models():
                self._plain_reference = make_twin(self._reference or self._plain)
        output = self._model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        twin = self._plain_reference
        with torch.no_grad(), adapters_off(twin) if base_is_reference else contextlib.nullcontext():
            other = twin(input_ids=input_ids, attention_mask=attention_mask).logits
        mine, theirs = output.logits.float().log_softmax(-1), other.float().log_softmax(-1)
        kl = (mine.exp() * (mine - theirs)).sum(-1)
        output["kl"] = kl if attention_mask is None else kl.masked_fill(~attention_mask.bool(), 0)
        return output

    def generate_with_value(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, max_new_tokens: int = 64, **more: Any
    ) -> DataProto:
        """:meth:`verl_rollout` with ``values`` (B, R): the value head's prediction before each response token."""
        batch = self.verl_rollout(input_ids, attention_mask, max_new_tokens, **more)
        roles = self._made_roles()
        if roles.critic is None:
            raise ConfigError("generate_with_value needs a value head: use algorithm.adv_estimator=gae")
        batch.batch["values"] = roles.values(batch).batch["values"]
        return batch

    def shard_for_hybrid(self, mode: Literal["rollout", "update"]) -> PreTrainedModel:
        """Bring the model into the layout and mode of ``rollout`` (eval) or ``update`` (train); returns the model.

        On one device both uses share one set of weights, so nothing is copied.
        """
        if mode not in ("rollout", "update"):
            raise ConfigError(f"shard_for_hybrid({mode!r}): the modes are 'rollout' and 'update'")
        return self._model.train(mode == "update")

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def _mini_batch(self) -> int | None:
        return self._config.actor_rollout_ref.actor.ppo_mini_batch_size

    def _made_roles(self) -> Roles:
        if self._roles is None:
            parts = self._parts
            self._roles = make_roles(
                self._plain, self._reference, self._config, parts.choice, parts.tokenizer, parts.reward
            )
        return self._roles

    def _scored(self, batch: DataProto, rewards: torch.Tensor | Sequence[float] | None) -> DataProto:
        """The batch with ``token_level_scores`` (each row's reward on its last token) and ``score_valid``."""
        if rewards is None:
            if self._parts.reward is None:
                raise RewardError(
                    "verl_update(batch, rewards=...) needs one reward a row, or wrap_for_rl(reward_fn=...)"
                )
            return batch.union(self._parts.reward.score(batch).result().select(
                batch_keys=["token_level_scores", "score_valid"], non_tensor_batch_keys=[], meta_info_keys=[]
            ))  # fmt: skip
        values = torch.as_tensor(rewards, dtype=torch.float32).detach().cpu()
        if values.shape != (len(batch),):
            raise RewardError(
                f"rewards has the shape {tuple(values.shape)}, expected ({len(batch)},): one for each row"
            )
        mask = as_mask(batch.batch["response_mask"])
        scores = torch.where(last_token(mask), values[:, None], torch.zeros(()))
        scored = batch.select()
        scored.batch = scored.batch.clone(recurse=False)
        scored.batch["token_level_scores"] = scores
        scored.batch["score_valid"] = torch.isfinite(values) & mask.any(1)
        return scored

    def _use_temperature(self, roles: Roles, temperature: float) -> None:
        """Log-probs of the update are those of the distribution that was sampled."""
        for group in (roles.actor, roles.reference):
            for worker in group.workers if group is not None else ():
                worker.settings = replace(worker.settings, temperature=temperature)


class _Parts:
    """What does not change with the weights."""

    def __init__(self, choice: Any, tokenizer: Any, reward: RewardRunner | None):
        self.choice, self.tokenizer, self.reward = choice, tokenizer, reward


if TYPE_CHECKING:

    class RLModel(PreTrainedModel, RLMethods):
        """A model that wrap_for_rl has wrapped, for editors and type checkers."""


def wrap_for_rl(
    model: PreTrainedModel,
    enable_kl_penalty: bool = True,
    use_flash_attention: bool | None = None,
    offload_reward_to_cpu: bool = False,
    reference: PreTrainedModel | None = None,
    reward_fn: Any = None,
    *,
    tokenizer: Any = None,
    config: Mapping[str, Any] | None = None,
) -> RLModel:
    """Give a causal language model the methods of :class:`RLMethods`, and return the same object.

    Class, weights, ``forward``, ``generate`` and ``save_pretrained`` stay Hugging Face's own: training and rollout work
    on twins that share the weights. The optimizer is made at the first use of the methods. For half-precision weights
    it keeps float32 masters, and then takes over their ``.grad``.

    Args:
        enable_kl_penalty: subtract the KL against the reference from the reward.
        use_flash_attention: True: use it, with a notice where there is none; None: the best there is; False: SDPA.
        offload_reward_to_cpu: a reward model given as ``reward_fn`` stays on the CPU.
        reference: the frozen model of the KL; None: a frozen copy of ``model`` as it is now or, where it has LoRA
            adapters (peft's wrapper, or injected by peft), its base without them: no copy is made, and
            only the adapters are trained.
        reward_fn: as ``RLTrainer(reward_fn=)``; for :meth:`RLMethods.verl_update` without rewards.
        tokenizer: for stop texts and reward functions; None: the one beside the model, if there is one.
        config: further configuration keys, such as ``actor_rollout_ref.actor.optim.lr``.

    Raises:
        ModelError: not a causal language model, or one that accelerate spreads over devices.
    """
    plain = plain_model(model)
    check_model(plain)
    settings = make_config(enable_kl_penalty, config)
    choice = choose(plain, use_flash_attention)
    tokenizer = tokenizer if tokenizer is not None else tokenizer_of(plain)
    if is_reward_model(reward_fn):
        reward_fn = RewardModel(reward_fn, device="cpu" if offload_reward_to_cpu else choice.device.kind)
        if offload_reward_to_cpu:
            reward_fn.model.to("cpu")
    elif offload_reward_to_cpu:
        notice("offload_reward_to_cpu has no effect: the reward is not a model")
    reward = None if reward_fn is None else RewardRunner(reward_fn, tokenizer)
    if reference is None and needs_reference(settings) and not has_adapters(plain):
        reference = frozen_copy(plain)
    methods = RLMethods(model, reference, settings, _Parts(choice, tokenizer, reward))
    for name in METHODS:
        setattr(model, name, getattr(methods, name))
    return cast("RLModel", model)


def _prompt_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, *, prefix: str) -> DataProto:
    if input_ids.ndim != 2 or not len(input_ids):
        raise DataError(f"input_ids has the shape {tuple(input_ids.shape)}; verl_rollout takes (rows, prompt tokens)")
    keep = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if keep.shape != input_ids.shape:
        raise DataError(f"attention_mask has the shape {tuple(keep.shape)}, input_ids {tuple(input_ids.shape)}")
    ids = [row[mask].cpu().numpy().astype(np.int64) for row, mask in zip(input_ids, keep, strict=True)]
    if not all(len(row) for row in ids):
        raise DataError(f"row {[len(row) for row in ids].index(0)} of input_ids has no token to continue")
    uids = object_column([f"{prefix}{i}" for i in range(len(ids))])
    return DataProto(non_tensor_batch={"uid": uids, "prompt_ids": object_column(ids)})
