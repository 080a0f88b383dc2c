"""The rollout engines that exist, and how each is made."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.errors import RolloutError
from verl.notices import notice
from verl.rollout.base import RolloutEngine
from verl.rollout.hf import HFEngine
from verl.rollout.native import NativeEngine
from verl.rollout.native.admission import NotQualified
from verl.rollout.remote.engine import RemoteRequests
from verl.rollout.remote.settings import RemoteSettings
from verl.rollout.sglang.engine import SGLangEngine
from verl.rollout.vllm.engine import VLLMEngine
from verl.rollout.vllm.server import VLLMServerEngine

ENGINES: dict[str, type[RolloutEngine]] = {
    "native": NativeEngine,
    "hf": HFEngine,
    "vllm": VLLMEngine,
    "vllm_server": VLLMServerEngine,
    "sglang": SGLangEngine,
}


def make_engine(
    name: str,
    twin: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: tuple[int, ...],
    *,
    remote: RemoteSettings | None = None,
    **settings,
) -> RolloutEngine:
    """The engine ``name`` over the rollout twin; ``engine.name`` tells which one came out.

    ``remote`` is what an engine that works elsewhere is told, ``settings`` go to the others.
    A model that the native engine cannot drive gets the simple engine, with a notice that says why.
    """
    if name not in ENGINES:
        raise RolloutError(f"There is no rollout engine '{name}'; there are {', '.join(sorted(ENGINES))}.")
    if issubclass(ENGINES[name], RemoteRequests):
        return ENGINES[name](twin, tokenizer, eos_token_ids, remote or RemoteSettings())
    if name == "native":
        try:
            return NativeEngine(twin, tokenizer, eos_token_ids, **settings)
        except NotQualified as reason:
            notice(f"{type(twin).__name__} generates with the simple engine 'hf' instead of 'native': {reason}")
    rows = {key: value for key, value in settings.items() if key == "max_num_seqs"}
    return HFEngine(twin, tokenizer, eos_token_ids, **rows)
