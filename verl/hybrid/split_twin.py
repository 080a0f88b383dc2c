"""A rollout twin of which several ranks each hold a part: what they add to its forward to be the whole model.

Every rank computes its heads and its share of an MLP; the outputs of the narrowing matrices are summed over the ranks.
Of the vocabulary each looks up its own rows (the others' are 0 in the sum), and the logits of all are gathered: those
of the few places that are sampled from, so that every rank draws from the same distribution.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from verl.models.cuts import Cuts


def split_twin(twin: PreTrainedModel, cuts: Cuts, group: dist.ProcessGroup) -> None:
    """Let ``twin``, whose parameters are the parts of this rank of ``group``, compute with the other ranks.

    From then on all ranks of the group must call it together, with the same inputs.
    """
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    for name in cuts.columns:
        twin.get_submodule(name).register_forward_hook(_Sum(group))
    vocabulary = twin.config.get_text_config().vocab_size
    embedding = twin.get_submodule(cuts.embedding)
    assert isinstance(embedding, nn.Embedding)
    embedding.num_embeddings, embedding.padding_idx = len(embedding.weight), None
    look_up = _OwnRows(dist.get_rank(group) * len(embedding.weight), len(embedding.weight), group)
    embedding.register_forward_pre_hook(look_up.before)
    embedding.register_forward_hook(look_up.after)
    if cuts.head is not None:
        twin.get_submodule(cuts.head).register_forward_hook(_Gather(vocabulary, group))
    _count_heads(twin, cuts)


def _count_heads(twin: PreTrainedModel, cuts: Cuts) -> None:
    """Tell modules and config of the twin how many heads there are here."""
    config = twin.config.get_text_config()
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    heads, keys = cuts.heads // cuts.size, max(1, cuts.keys // cuts.size)
    config.num_attention_heads, config.num_key_value_heads = heads, keys
    here = {
        "num_heads": heads,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "num_key_value_groups": heads // keys,
    }
    for name in cuts.rows:
        attention = twin.get_submodule(name.rpartition(".")[0])
        for attribute, value in here.items():
            if isinstance(getattr(attention, attribute, None), int):
                setattr(attention, attribute, value)


class _Sum:
    """The sum of all ranks' outputs."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    @torch.compiler.disable  # as the attention: a captured graph makes the break free
    def __call__(self, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        output = output.contiguous()
        dist.all_reduce(output, group=self.group)
        return output


class _OwnRows:
    """Embeddings of the ids in this rank's rows of the vocabulary, and through the sum those of all ids."""

    def __init__(self, start: int, rows: int, group: dist.ProcessGroup):
        self.start, self.rows = start, rows
        self.sum = _Sum(group)
        self._elsewhere: torch.Tensor | None = None

    def before(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        place = inputs[0] - self.start
        self._elsewhere = (place < 0) | (place >= self.rows)
        return (place.masked_fill(self._elsewhere, 0),)

    def after(self, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        assert self._elsewhere is not None
        mine = output.masked_fill(self._elsewhere[..., None], 0)
        self._elsewhere = None
        return self.sum(module, inputs, mine)


class _Gather:
    """(..., V) logits out of each rank's (..., v)."""

    def __init__(self, vocabulary: int, group: dist.ProcessGroup):
        self.vocabulary, self.group = vocabulary, group

    @torch.compiler.disable
    def __call__(self, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        *lead, rows = output.shape
        ranks = dist.get_world_size(self.group)
        parts = output.new_empty(ranks, *lead, rows)
        dist.all_gather_into_tensor(parts.view(-1), output.contiguous().view(-1), group=self.group)
        return parts.movedim(0, -2).reshape(*lead, ranks * rows)[..., : self.vocabulary]
