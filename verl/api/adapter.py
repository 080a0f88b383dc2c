"""What wrap_for_rl puts behind a model object: the roles of a training step around weights that stay its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.algorithms.kl_controller import get_kl_controller
from verl.config import Config, load_config, resolve
from verl.errors import ModelError
from verl.hardware import Choice, decide
from verl.hardware.choice import ATTENTIONS
from verl.hybrid import make_twin
from verl.models.backbone import hidden_states, lm_head, use_packed_attention
from verl.models.loading import building_models, disable_dropout, load_tokenizer
from verl.models.lora import ADAPTER
from verl.models.packing import pack
from verl.models.policy import prepare_policy
from verl.notices import notice
from verl.protocol import DataProto
from verl.single_controller import LocalWorkerGroup
from verl.trainer.roles import Roles
from verl.trainer.settings import actor_settings, critic_settings, reference_settings
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.reference import Reference

_FLASH = ("varlen", "flash_attn")


@dataclass
class TokenIds:
    """Stands in for a tokenizer where only ids are known."""

    pad_token_id: int
    eos_token_id: int | None

    def decode(self, *_: Any, **__: Any) -> str:
        raise ModelError("texts need a tokenizer: give wrap_for_rl(model, tokenizer=...)")

    batch_decode = decode


class SharedValue(nn.Module):
    """(B, R) values: a linear head on the policy's last hidden states. Only the head is trained.

    The policy is not a submodule, so its weights are neither saved nor trained by way of this one.
    """

    def __init__(self, policy: PreTrainedModel):
        super().__init__()
        weight, _, _ = lm_head(policy)
        self._policy = [policy]
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device)
        # zero: the first values are 0 everywhere, whatever the seed
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: DataProto) -> torch.Tensor:
        packed = pack(batch, device=self.head.weight.device)
        if not len(packed.target):
            return torch.zeros(packed.shape, device=self.head.weight.device)
        with torch.no_grad():
            hidden = hidden_states(self._policy[0], packed)[packed.source].float()
        return packed.to_grid(self.head(hidden)[:, 0])


def make_config(enable_kl_penalty: bool, more: Mapping[str, Any] | None) -> Config:
    """PPO over the rows given, with the KL against the reference in the reward where asked for."""
    own = {"algorithm.use_kl_in_reward": enable_kl_penalty, "data.max_response_length": 1}
    return load_config(values={**own, **(more or {})})


def plain_model(model: Any) -> Any:
    """The transformers model inside peft's wrapper, with its adapters in it; any other object as it is."""
    peft = sys.modules.get("peft")  # a wrapper of peft's can only exist if somebody has imported it
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    if set(model.peft_config) != {ADAPTER}:
        raise ModelError(f"wrap_for_rl trains one adapter named '{ADAPTER}'; the model has {sorted(model.peft_config)}")
    return model.get_base_model()


def check_model(model: Any) -> None:
    """Raise ModelError for what cannot be wrapped."""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ModelError(
            "wrap_for_rl takes a causal language model of transformers (AutoModelForCausalLM), got "
            f"{type(model).__name__}"
        )
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        shown = ", ".join(sorted(map(str, places)))
        raise ModelError(
            f"the model is spread over {shown} by accelerate's hooks, which move weights while they are used: load it "
            "without device_map and put it on one device with .to(device)"
        )
    if any(p.device.type == "meta" for p in model.parameters()):
        raise ModelError("the model has weights on the meta device: load it without device_map")


def choose(model: PreTrainedModel, use_flash_attention: bool | None) -> Choice:
    """What this machine does for the model, in the dtype that it is in."""
    weight = next(model.parameters())
    choice = decide(weight.device.type)
    dtype = str(weight.dtype).removeprefix("torch.")
    choice = replace(choice, dtype=dtype, rollout_dtype=dtype)
    flash = [name for name in _FLASH if name in choice.works("attention", ATTENTIONS) and dtype != "float32"]
    if use_flash_attention and not flash:
        lack = choice.lacks.get("attention.varlen", f"it does not compute in {dtype}")
        notice(f"use_flash_attention=True: there is no flash attention here ({lack}); attention is SDPA.")
    wanted = flash[0] if flash and use_flash_attention is not False else "sdpa"
    return replace(choice, attention=wanted)


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer of the folder or hub name that the model came from, else ids alone."""
    path = model.name_or_path
    if path:
        try:
            return load_tokenizer(path)
        except ModelError:
            notice(f"No tokenizer is with {path}: wrap_for_rl(tokenizer=...) is needed for stop texts and rewards.")
    eos = model.config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos
    pad = model.config.pad_token_id
    return TokenIds(pad_token_id=pad if pad is not None else eos or 0, eos_token_id=eos)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it is now: a twin with weights of its own."""
    with building_models():
        twin = make_twin(model)
    copies: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in twin.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                copy = copies.setdefault(id(parameter), nn.Parameter(parameter.detach().clone(), requires_grad=False))
                module._parameters[name] = copy
    return twin


def make_roles(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    config: Config,
    choice: Choice,
    tokenizer: Any,
    reward: Any,
) -> Roles:
    """The workers around ``model``'s own weights: training and rollout work on twins that share them.

    With adapters in the model, those are trained, and without a ``reference`` their base is it.
    """
    config = resolve(config)
    config.actor_rollout_ref.model.path = config.critic.model.path = model.name_or_path or type(model).__name__
    settings = actor_settings(config, choice, 0)
    with building_models():
        policy = make_twin(model)
        disable_dropout(policy)
        policy = prepare_policy(policy, settings.model)
    critic = critic_settings(config, choice, 0)
    ref = reference_settings(config, choice)
    frozen = None
    if reference is not None and ref is not None:
        with building_models():
            frozen = make_twin(reference)
            use_packed_attention(frozen, explicit=ref.model.attention, kernel=ref.model.kernel)
    return Roles(
        actor=LocalWorkerGroup(Actor, settings, model=policy, tokenizer=tokenizer),
        reference=LocalWorkerGroup(Reference, ref, model=frozen) if frozen is not None else None,
        critic=LocalWorkerGroup(Critic, critic, model=SharedValue(policy)) if critic else None,
        reward=reward,
        kl_controller=get_kl_controller(config.algorithm.kl_ctrl),
        prompt_columns=(),
        dump_folder=Path("."),
    )
