"""VLLMActor: a policy whose rollouts run in vLLM, to be given to RLTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class VLLMActor:
    """Describes the policy; nothing is loaded before the trainer's first step.

    The model is trained by the trainer and generates in vLLM, on the same device and in a process of its own. vLLM
    takes the new weights over in place before each rollout and gives its memory back for the update, so a large
    ``gpu_memory_utilization`` is fine. Where vLLM is not installed or cannot run, the native engine generates, with a
    notice; ``strict=True`` makes that an error.

    Args:
        model_name: folder or hub name of a causal language model.
        tensor_parallel_size: GPUs that share the model in vLLM.
        gpu_memory_utilization: share of the GPU that vLLM may use while it generates.
        dtype: type that vLLM computes in; None: the model's.
        max_model_len: tokens of prompt and response together; None: the trainer's ``max_seq_len``.
        enforce_eager: no compilation and no CUDA graphs; None: on a CPU only.
        strict: stop where vLLM cannot be used.
        engine_kwargs: more of vLLM's engine arguments, by name.

    Raises:
        ConfigError: a value is not one.
    """

    model_name: str
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    dtype: str | None = None
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    strict: bool = False
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.tensor_parallel_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"VLLMActor(tensor_parallel_size={size!r}) must be a whole number of at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"VLLMActor(gpu_memory_utilization={self.gpu_memory_utilization!r}) is a share: above 0, up to 1"
            )

    def settings(self) -> dict[str, Any]:
        """The configuration keys that say the same; None where nothing was asked for."""
        return {
            "actor_rollout_ref.model.path": self.model_name,
            f"{_ROLLOUT}.name": "vllm",
            f"{_ROLLOUT}.tensor_model_parallel_size": self.tensor_parallel_size,
            f"{_ROLLOUT}.gpu_memory_utilization": self.gpu_memory_utilization,
            f"{_ROLLOUT}.dtype": self.dtype,
            f"{_ROLLOUT}.max_model_len": self.max_model_len,
            f"{_ROLLOUT}.enforce_eager": self.enforce_eager,
            f"{_ROLLOUT}.strict": self.strict or None,
            f"{_ROLLOUT}.engine_kwargs.vllm": dict(self.engine_kwargs) or None,
        }


def actor_settings(actor_model: Any, model_name: str | None) -> dict[str, Any]:
    """The keys of an ``actor_model`` parameter; none without one.

    Raises:
        ConfigError: it is something else than a VLLMActor, or the model is named twice.
    """
    if actor_model is None:
        return {}
    if not isinstance(actor_model, VLLMActor):
        raise ConfigError(
            f"actor_model is a {type(actor_model).__name__}; give a verl.VLLMActor, or name the model in model_name"
        )
    if model_name is not None and model_name != actor_model.model_name:
        raise ConfigError(
            f"model_name={model_name!r} and actor_model's {actor_model.model_name!r} are both given: keep one"
        )
    return actor_model.settings()
