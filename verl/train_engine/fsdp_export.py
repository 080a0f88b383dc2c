"""Write the Hugging Face folder of a model that is spread over ranks, one tensor at a time.

Tensors are gathered one by one on all ranks; rank 0 keeps them on the host until a shard file is full. So the host
never holds more than one shard file and one decoder layer, whatever the size of the model.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.errors import ModelError
from verl.models.loading import building_models
from verl.models.lora import adapted_layers, has_adapters, save_adapter, trained_head
from verl.models.value import HEAD_FILE, ValueModel
from verl.train_engine.spread import SpreadModule

SHARD_BYTES = 5_000_000_000


@torch.no_grad()
def gather_weights(sharded: SpreadModule) -> dict[str, torch.Tensor] | None:
    """All weights in the type that computes, on the host of rank 0; None on the others, which all call this."""
    found = {}
    for name in sharded.shapes:
        whole = sharded.whole(name)
        if sharded.comm.rank == 0:
            found[name] = whole.cpu()
    return found if sharded.comm.rank == 0 else None


class StreamedExport:
    """Attributes:
    most_bytes: the most tensor bytes that this rank's host held at a time, for tests.
    """

    def __init__(self, sharded: SpreadModule, *, shard_bytes: int = SHARD_BYTES):
        self.sharded = sharded
        self.shard_bytes = shard_bytes
        self.most_bytes = 0
        self.writes = sharded.comm.rank == 0

    def save(self, module: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | os.PathLike) -> None:
        """Write ``module``, a causal LM or a value model, as its unsharded counterpart would be saved.

        All ranks call this together; rank 0 writes.
        """
        value = module if isinstance(module, ValueModel) else None
        model, prefix = (value.model, "model.") if value is not None else (module, "")
        assert isinstance(model, PreTrainedModel)
        place = Path(folder)
        index: dict[str, str] = {}
        files: list[Path] = []
        shard: dict[str, torch.Tensor] = {}
        total = 0
        for unit in self._layers(model, prefix):
            total += _bytes(unit)
            if shard and _bytes(shard) + _bytes(unit) > self.shard_bytes:
                self._flush(shard, place, files, index)
            shard |= unit
            self.most_bytes = max(self.most_bytes, _bytes(shard))
        if self.writes:
            self._flush(shard, place, files, index)
            _name_files(place, files, index, total)
            self._save_rest(model, tokenizer, place)
        if has_adapters(model):
            self._save_adapter(model, prefix, place)
        if value is not None and value.own_head is not None:
            head = {f"head.{k.removeprefix('own_head.')}": self._whole(k) for k in self._names("own_head.")}
            if self.writes:
                save_file(head, place / HEAD_FILE)

    def _names(self, prefix: str) -> list[str]:
        return [name for name in self.sharded.shapes if name.startswith(prefix)]

    def _layers(self, model: PreTrainedModel, prefix: str) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of each unit on the host of rank 0, under the names of the file format (none elsewhere)."""
        from transformers.core_model_loading import revert_weight_conversion

        adapted = adapted_layers(model) if has_adapters(model) else {}
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        for unit in self.sharded.units:
            found = {}
            for name in unit:
                plain = name.removeprefix(prefix)
                if not name.startswith(prefix) or ".lora_" in plain or plain in ignored:
                    continue
                tensor = self._whole(name, adapted.get(plain), prefix)
                if self.writes:
                    found[plain.replace(".base_layer.", ".")] = tensor
            # fused experts and the like are stored apart; what belongs together lies in one layer
            yield revert_weight_conversion(model, found) if found else found
        yield {n: b.detach().cpu().clone() for n, b in _persistent_buffers(model)} if self.writes else {}

    def _whole(self, name: str, adapted=None, prefix: str = "") -> torch.Tensor:
        tensor = self._gather(name)
        if adapted is not None:
            stem = name.removesuffix(".base_layer.weight")
            down, up = (self._gather(f"{stem}.lora_{letter}.default.weight") for letter in "AB")
            delta = dataclasses.replace(adapted, down=down, up=up).delta()
            tensor = (tensor.float() + delta).to(tensor.dtype)
        return tensor.cpu() if self.writes else tensor[:0]

    def _gather(self, name: str) -> torch.Tensor:
        return self.sharded.whole(name)

    def _flush(self, shard: dict[str, torch.Tensor], place: Path, files: list[Path], index: dict[str, str]) -> None:
        if not shard:
            return
        files.append(place / f".part-{len(files) + 1:05d}.safetensors")
        save_file({k: v.contiguous() for k, v in shard.items()}, files[-1], metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, files[-1].name))
        shard.clear()

    def _save_rest(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, place: Path) -> None:
        config = copy.deepcopy(model.config)
        config._attn_implementation = None
        config.dtype = str(self.sharded.live_dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        with building_models():
            config.save_pretrained(place)
            if model.can_generate():
                model.generation_config.save_pretrained(place)
            if tokenizer is not None:
                tokenizer.save_pretrained(place)

    def _save_adapter(self, model: PreTrainedModel, prefix: str, place: Path) -> None:
        head = trained_head(model)[1]
        names = [n for n in self.sharded.shapes if ".lora_" in n or n.removeprefix(prefix) in head]
        tensors = {n.removeprefix(prefix): self._whole(n) for n in names}
        if self.writes:
            save_adapter(model, place, tensors)


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _name_files(place: Path, files: list[Path], index: dict[str, str], total: int) -> None:
    """Give the parts the names of the format, which tell how many there are, and write the index of several."""
    if not files:
        raise ModelError("The model has no weights to save.")
    if len(files) == 1:
        os.replace(files[0], place / "model.safetensors")
        return
    names = {part.name: f"model-{i:05d}-of-{len(files):05d}.safetensors" for i, part in enumerate(files, start=1)}
    for part in files:
        os.replace(part, place / names[part.name])
    document = {
        "metadata": {"total_size": total},
        "weight_map": {tensor: names[part] for tensor, part in sorted(index.items())},
    }
    (place / "model.safetensors.index.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
