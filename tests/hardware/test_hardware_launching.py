"""A GPU with less shared memory than a Triton kernel asks for: what the kernel does is done without it, and said.

The GPU is a stand-in: Triton's place is taken by one whose launcher raises Triton's error, on the CPU.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import make_model, make_tokenizer

from verl import notices
from verl.hardware import launching
from verl.hybrid import make_twin
from verl.models import linear_logprob
from verl.models.linear_logprob import linear_log_prob
from verl.rollout import Request, SamplingParams
from verl.rollout.native import NativeEngine, graphs, layouts
from verl.rollout.native.graphs import GraphRunner


class OutOfResources(Exception):
    """Named as ``triton.runtime.errors.OutOfResources`` is."""


class Kernel:
    """A kernel that this GPU cannot launch; ``broken`` is which error it gives."""

    broken: type[Exception] = OutOfResources

    def __init__(self, function):
        self.name = function.__name__

    def __getitem__(self, grid):
        launched.append(self.name)
        text = "out of resource: shared memory, Required: 81920, Hardware limit: 49152. Reducing block sizes may help."
        raise self.broken(text)


launched: list[str] = []


@pytest.fixture
def small_gpu(monkeypatch):
    """Triton with that launcher, for modules that are loaded anew."""
    fakes = {"triton": ModuleType("triton"), "triton.language": ModuleType("triton.language")}
    fakes["triton.language.extra"] = ModuleType("triton.language.extra")
    fakes["triton"].jit, fakes["triton"].language = Kernel, fakes["triton.language"]
    fakes["triton"].next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    fakes["triton"].cdiv = lambda a, b: -(-a // b)
    fakes["triton.language"].constexpr, fakes["triton.language"].extra = int, fakes["triton.language.extra"]
    fakes["triton.language.extra"].libdevice = SimpleNamespace()
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("rollout.native.kernels", "rollout.native.sampling_kernels", "rollout.native.device_layouts",
                 "models.logprob_kernels"):  # fmt: skip
        monkeypatch.delitem(sys.modules, f"verl.{name}", raising=False)
    monkeypatch.setattr(launching, "_refused", set())
    launched.clear()
    notices.reset()
    yield
    for name in ("kernels", "sampling_kernels", "device_layouts"):
        sys.modules.pop(f"verl.rollout.native.{name}", None)
    sys.modules.pop("verl.models.logprob_kernels", None)
    notices.reset()


class HostRunner(GraphRunner):
    """The steps of a GPU on the host, without graphs."""

    def allocate(self, num_pages, most):
        self.cache.allocate(num_pages)

    def _join_linears(self):
        pass


class Engine(NativeEngine):
    def _make_runner(self, twin, shape):
        return HostRunner(twin, shape, self.settings)


def requests():
    prompts = ([7, 8, 9], [20], [7, 8, 9], list(range(10, 26)))
    return [Request(f"r{i}", np.array(p), SamplingParams(19, temperature=1.1), seed=i) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("where", ["at once", "only with many rows", "only when sampling"])
def test_the_rollout_goes_on_without_the_kernels(small_gpu, monkeypatch, where):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    device_layouts = importlib.import_module("verl.rollout.native.device_layouts")
    if where != "at once":  # prompts, and few rows, fit: their layouts here are those of torch's own operations

        def decode(cache, table, positions, sharing):
            if where == "only with many rows" and len(positions) > 3:
                return device_layouts_decode(cache, table, positions, sharing)
            return layouts.GatherLayout(cache, table.long(), positions)

        device_layouts_decode = device_layouts.TritonDecodeLayout
        monkeypatch.setattr(device_layouts, "TritonPrefillLayout", layouts.PrefillLayout)
        monkeypatch.setattr(device_layouts, "TritonDecodeLayout", decode)
    if where == "only with many rows":
        monkeypatch.setattr("verl.rollout.native.sampling_kernels.draw_rows", plain_draw)

    model = make_model("llama", dtype=torch.float32)
    wanted = NativeEngine(make_twin(model), make_tokenizer(), (1,), page_size=4).generate(requests())
    engine = Engine(make_twin(model), make_tokenizer(), (1,), page_size=4, graphs=False, window=4)
    done = engine.generate(requests())
    assert [c.token_ids.tolist() for c in done] == [c.token_ids.tolist() for c in wanted]
    assert len(launched) == 1 and not engine.runner.triton, "once it is known, no kernel is tried again"
    (said,) = [text for text in notices.seen() if "Triton" in text]
    assert "Required: 81920, Hardware limit: 49152" in said and "gathered for SDPA" in said
    assert not graphs.triton_works(engine.runner.cache.shape), "the next engine knows it from the start"


def plain_draw(logits, temperature, noisy, seed, step):
    """What the sampling kernel computes."""
    from verl.rollout.sampling import gumbel_noise

    scaled = logits.float() / temperature[:, None]
    noise = gumbel_noise(seed, step, logits.shape[1])
    tokens = torch.where(noisy[:, None] > 0, scaled + noise, scaled).argmax(-1)
    return tokens, scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_and_their_gradients_are_those_of_the_plain_operations(small_gpu, monkeypatch, entropy):
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(7, 8), torch.randn(11, 8), torch.randint(0, 11, (7,))

    def run():
        h, w = (x.bfloat16().requires_grad_() for x in (hidden, weight))
        log_prob, of_entropy = linear_log_prob(h, w, target, with_entropy=entropy)
        (log_prob.sum() + (of_entropy.sum() if entropy else 0)).backward()
        return log_prob, h.grad, w.grad

    wanted = run()
    monkeypatch.setattr(linear_logprob, "_has_kernels", lambda device: True)
    got = run()
    assert launched == ["_forward_kernel"]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert any("log-probs" in text and "torch's own operations" in text for text in notices.seen())


def test_a_backward_pass_that_cannot_launch(small_gpu, monkeypatch):
    """The forward kernel fits, the backward one does not."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(7, 8), torch.randn(11, 8), torch.randint(0, 11, (7,))
    logprob_kernels = importlib.import_module("verl.models.logprob_kernels")

    def forward(logits, target, out, **shape):
        linear_logprob._chunk_forward(logits.float(), target, out, None, 1.0, False)

    def run():
        h = hidden.bfloat16().requires_grad_()
        log_prob, of_entropy = linear_log_prob(h, weight.bfloat16(), target, with_entropy=True)
        (log_prob.sum() + of_entropy.sum()).backward()
        return h.grad

    wanted = run()
    monkeypatch.setattr(linear_logprob, "_has_kernels", lambda device: True)
    monkeypatch.setattr(logprob_kernels, "rows_forward", forward)
    assert torch.equal(run(), wanted) and launched == ["_backward_kernel"]


def test_other_errors_are_not_taken_for_it(small_gpu, monkeypatch):
    monkeypatch.setattr(Kernel, "broken", RuntimeError)
    monkeypatch.setattr(linear_logprob, "_has_kernels", lambda device: True)
    with pytest.raises(RuntimeError, match="out of resource"):
        linear_log_prob(torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.zeros(3, dtype=torch.long))
    assert not notices.seen()
