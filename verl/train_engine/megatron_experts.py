"""A mixture of experts whose experts lie over the ranks over which other matrices are cut (expert parallelism).

Every rank sees all tokens of a micro-batch, as it does for other matrices, and computes what its experts add to them;
the sum over ranks is the layer's output. So no token is sent to another rank, and no capacity drops one.

Dimension key: T tokens, D hidden size, E experts, e of this rank, I intermediate size, K experts a token.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn


class Experts(nn.Module):
    """Takes the place of Megatron's MLP. :func:`experts_of` makes a class for a model.

    Attributes:
        model: the Hugging Face config (Mixtral's names).
        group: the ranks over which the experts lie.
    """

    model: ClassVar[Any]
    group: ClassVar[dist.ProcessGroup]

    def __init__(self, config: Any, **kwargs: Any):
        super().__init__()
        hf, ranks = self.model, dist.get_world_size(self.group)
        here = hf.num_local_experts // ranks
        self.first = here * dist.get_rank(self.group)
        self.scattered = config.sequence_parallel
        dtype = config.params_dtype
        self.router = nn.Parameter(torch.empty(hf.num_local_experts, hf.hidden_size, dtype=dtype))
        self.fc1 = nn.Parameter(torch.empty(here, 2 * hf.intermediate_size, hf.hidden_size, dtype=dtype))
        self.fc2 = nn.Parameter(torch.empty(here, hf.hidden_size, hf.intermediate_size, dtype=dtype))

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """(T, 1, D), or this rank's share of the tokens, to the same."""
        from megatron.core.tensor_parallel import mappings

        if self.scattered:
            x = mappings.gather_from_sequence_parallel_region(hidden, group=self.group)
        else:
            x = mappings.copy_to_tensor_model_parallel_region(hidden, group=self.group)
        out = self._own(x[:, 0])[:, None]
        if self.scattered:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.group), None
        return mappings.reduce_from_tensor_model_parallel_region(out, group=self.group), None

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """(T, D) what this rank's experts add."""
        wide = torch.promote_types(x.dtype, torch.float32)
        share, chosen = (x @ self.router.t()).to(wide).softmax(-1).topk(self.model.num_experts_per_tok)
        share = share / share.sum(-1, keepdim=True)  # (T, K)
        out = torch.zeros_like(x)
        for number in range(len(self.fc1)):
            token, place = torch.where(chosen == self.first + number)
            gate, up = nn.functional.linear(x[token], self.fc1[number]).chunk(2, -1)
            found = nn.functional.linear(nn.functional.silu(gate) * up, self.fc2[number])
            out = out.index_add(0, token, (found * share[token, place, None]).to(out.dtype))
        return out


def experts_of(hf: Any, group: dist.ProcessGroup) -> type[Experts]:
    """The class that Megatron builds for every layer of a model."""
    return type("Experts", (Experts,), {"model": hf, "group": group})
