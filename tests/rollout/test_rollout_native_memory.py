"""Pages that are mapped, growth, tokens that growth does not change, and what ten rollouts leave behind."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_model, make_tokenizer

from verl.errors import RolloutError
from verl.hybrid import OneDeviceHybrid, make_twin
from verl.rollout import Request, SamplingParams
from verl.rollout.native import NativeEngine
from verl.rollout.native.arena import Arena
from verl.rollout.native.cache import CacheShape, PagedCache
from verl.rollout.native.graphs import planes_of
from verl.rollout.native.runner import Runner

PROMPTS = [[7, 8, 9], list(range(10, 30)), [20], [7, 8, 9], list(range(10, 26)), list(range(30, 38))]


class FakeDriver:
    """Counts what is created, mapped and given back; has ``memory`` bytes."""

    def __init__(self, memory: int):
        self.memory, self.used, self.mapped, self.handles = memory, 0, {}, {}

    def cuMemGetAllocationGranularity(self, out, properties, option):
        out._obj.value = 64
        return 0

    def cuMemAddressReserve(self, out, size, *rest):
        out._obj.value = 1 << 20
        self.reserved = size.value
        return 0

    def cuMemCreate(self, out, size, *rest):
        if self.used + size.value > self.memory:
            return 2
        self.used += size.value
        out._obj.value = len(self.handles) + 1
        self.handles[out._obj.value] = size.value
        return 0

    def cuMemMap(self, start, size, offset, handle, flags):
        overlap = [a for a, n in self.mapped.items() if a < start.value + size.value and start.value < a + n]
        assert not overlap and size.value == self.handles[handle.value]
        self.mapped[start.value] = size.value
        return 0

    def cuMemSetAccess(self, start, size, access, count):
        assert self.mapped[start.value] == size.value
        return 0

    def cuMemUnmap(self, start, size):
        assert self.mapped.pop(start.value) == size.value
        return 0

    def cuMemRelease(self, handle):
        self.used -= self.handles[handle.value]
        return 0

    def cuMemAddressFree(self, start, size):
        assert size.value == self.reserved and not self.mapped
        return 0


def arena_of(driver: FakeDriver, planes: int, size: int) -> Arena:
    class Faked(Arena):
        @staticmethod
        def _open(device):
            return driver, 0

        def _wait(self):
            pass

    return Faked(planes, size, torch.device("cpu"))


def test_an_arena_maps_the_beginning_of_every_plane_and_grows_in_place():
    driver = FakeDriver(memory=4096)
    arena = arena_of(driver, planes=4, size=500)
    assert arena.pitch == 512 and driver.reserved == 2048 and driver.used == 0
    arena.map(100)
    assert arena.mapped == 128 and driver.used == 4 * 128
    arena.map(90)
    assert driver.used == 4 * 128  # there already
    arena.map(130)
    assert arena.mapped == 192 and sum(driver.mapped.values()) == driver.used == 4 * 192
    covered = sorted((a - arena.address) // 512 for a in driver.mapped)
    assert covered == [0, 0, 1, 1, 2, 2, 3, 3]
    arena.map(10_000)
    assert arena.mapped == 512  # never beyond the addresses
    arena.unmap()
    assert driver.used == 0 and not driver.mapped and arena.mapped == 0
    arena.map(64)
    arena.close()
    assert driver.used == 0


def test_a_growth_that_the_device_refuses_changes_nothing():
    driver = FakeDriver(memory=4 * 128 + 3 * 64)
    arena = arena_of(driver, planes=4, size=500)
    arena.map(128)
    with pytest.raises(RolloutError, match="cuMemCreate failed with error 2"):
        arena.map(192)
    assert arena.mapped == 128 and sum(driver.mapped.values()) == driver.used == 4 * 128
    arena.map(128)
    arena.close()


def test_planes_lie_a_pitch_apart():
    shape = CacheShape(3, 2, 4, 5, torch.float32, torch.device("cpu"))
    pitch = 7 * shape.plane_bytes + 48
    flat = torch.zeros(6 * pitch, dtype=torch.uint8)
    data = planes_of(flat, shape, 6, pitch)
    assert data.shape == (3, 2, 7, 5, 2, 4) and data[1, 1].is_contiguous()
    data[1, 1, 6, 4, 1, 3] = 1.0
    assert flat.view(torch.float32).nonzero()[0] * 4 == 3 * pitch + 7 * shape.plane_bytes - 4
    cache = PagedCache(shape)
    cache.data, cache.num_pages = data, 6
    cache.copy_pages([(6, 2)])
    assert torch.equal(data[:, :, 2], data[:, :, 6]) and data[1, 1, 2, 4, 1, 3] == 1


class GrowingRunner(Runner):
    """Grows like a device's cache: pages come in threes."""

    grows = True

    def allocate(self, num_pages: int, most: int) -> None:
        self.cache.allocate(min(most, -(-num_pages // 3) * 3))
        self.sizes = [*getattr(self, "sizes", []), self.cache.num_pages]


class GrowingEngine(NativeEngine):
    take_at_once = 0

    def _make_runner(self, twin, shape):
        return GrowingRunner(twin, shape, self.settings)


def requests_for(params, prompts=PROMPTS):
    return [Request(f"r{i}", np.array(p), params, seed=100 + i) for i, p in enumerate(prompts)]


def tokens_of(completions):
    return [c.token_ids.tolist() for c in completions]


@pytest.mark.parametrize("limits", [{}, {"max_pages": 80}, {"max_pages": 20, "max_num_batched_tokens": 7}])
def test_a_cache_that_grows_takes_what_the_rows_need_and_changes_no_token(limits):
    model = make_model("llama", dtype=torch.float64)
    params = SamplingParams(40, temperature=1.1, ignore_eos=True)
    wanted = tokens_of(
        NativeEngine(make_twin(model), make_tokenizer(), (1,), page_size=4).generate(requests_for(params))
    )
    engine = GrowingEngine(make_twin(model), make_tokenizer(), (1,), page_size=4, **limits)
    assert tokens_of(engine.generate(requests_for(params))) == wanted
    sizes = engine.runner.sizes
    assert sizes == sorted(set(sizes)) and sizes[0] <= 30 and len(sizes) > (limits.get("max_pages") != 20)
    assert sizes[-1] <= (limits.get("max_pages") or engine._most_pages())
    assert (engine.scheduler.preemptions > 0) == (limits.get("max_pages") == 20)
    engine.release()
    assert engine.runner.cache.num_pages == 0


def test_a_short_rollout_maps_little_of_a_large_plan():
    model = make_model("llama", dtype=torch.float64)
    engine = GrowingEngine(make_twin(model), make_tokenizer(), (1,), page_size=4, max_pages=100_000)
    engine.generate(requests_for(SamplingParams(4, ignore_eos=True)))
    assert engine.runner.sizes[-1] <= 40
    # what is little in bytes is taken at once
    at_once = GrowingEngine(make_twin(model), make_tokenizer(), (1,), page_size=4, max_pages=100_000)
    at_once.take_at_once = 1 << 20
    at_once.generate(requests_for(SamplingParams(40, ignore_eos=True)))
    assert at_once.runner.sizes == [75]
    # a request that only the whole plan can hold is taken
    engine.submit([Request("long", np.array([5] * 30), SamplingParams(399_970))])
    engine.abort()
    with pytest.raises(RolloutError, match="may need 400031 tokens, but the cache holds 400000"):
        engine.submit([Request("longer", np.array([5] * 31), SamplingParams(400_000))])


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
def test_a_switch_copies_no_weight(family, tied):
    """Train, generate, train: the same parameters at the same addresses, also where two layers share one."""
    model = make_model(family, tie_word_embeddings=tied).train()
    version = [0]
    hybrid = OneDeviceHybrid(
        model, lambda twin: NativeEngine(twin, make_tokenizer(), (1,), page_size=4), lambda: version[0]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    ids = torch.tensor([PROMPTS[1]])
    answers = []
    for _ in range(3):
        with hybrid.rollout_mode() as engine:
            answers.append(engine.generate(requests_for(SamplingParams(6, temperature=0, ignore_eos=True))))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        version[0] += 1
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    twins = dict(hybrid.twin.named_parameters(remove_duplicate=False))
    assert all(twins[name] is p for name, p in model.named_parameters(remove_duplicate=False))
    ends = {p.data_ptr() for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    assert len(ends) == (1 if tied else 2)
    # the engine saw each step: what it drew last is what the weights of before the last step say
    assert any(a.log_probs.tolist() != b.log_probs.tolist() for a, b in zip(answers[0], answers[2], strict=True))


def test_ten_cycles_leave_memory_flat():
    model = make_model("llama")
    version = [0]
    hybrid = OneDeviceHybrid(
        model, lambda twin: NativeEngine(twin, make_tokenizer(), (1,), page_size=4), lambda: version[0]
    )
    engine = hybrid._engine
    used, tensors = [], []
    tracemalloc.start()
    try:
        for _ in range(12):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.001)
            version[0] += 1
            with hybrid.rollout_mode():
                engine.generate(requests_for(SamplingParams(40, ignore_eos=True)))
                assert engine.runner.cascade.bytes > 0
                assert engine.runner.linears is None or engine.runner.linears.packed
            assert engine.runner.cache.data is None and engine.runner.cascade.bytes == 0
            assert engine.runner.linears is None or not engine.runner.linears.packed
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0])
            tensors.append(sum(o.numel() for o in gc.get_objects() if type(o) is torch.Tensor))
    finally:
        tracemalloc.stop()
    assert max(tensors[2:]) == min(tensors[2:])
    assert max(used[2:]) - min(used[2:]) < 64 << 10


def test_derived_copies_follow_a_weight_change():
    """Packed weights, slabs and pages are made anew: the tokens are those of a fresh engine."""
    model = make_model("qwen2", tie_word_embeddings=True)
    engine = NativeEngine(make_twin(model), make_tokenizer(), (1,), page_size=4)
    params = SamplingParams(40, temperature=0, ignore_eos=True)
    first = tokens_of(engine.generate(requests_for(params)))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)
    engine.weights_changed()
    second = tokens_of(engine.generate(requests_for(params)))
    fresh = NativeEngine(make_twin(model), make_tokenizer(), (1,), page_size=4, host_pack_bytes=0, host_slab_bytes=0)
    assert second == tokens_of(fresh.generate(requests_for(params))) != first
    assert fresh.runner.cascade.bytes == 0 < engine.runner.cascade.bytes


def test_taking_and_giving_back_pages_is_measured_apart():
    engine = NativeEngine(make_twin(make_model("llama")), make_tokenizer(), (1,), page_size=4, max_pages=20)
    engine.generate(requests_for(SamplingParams(40, ignore_eos=True)))
    first = engine.take_metrics().results()
    assert first["timing_s/kv_take"] > 0 and "timing_s/kv_give" not in first and first["rollout/preemptions"] > 0
    assert not len(engine.take_metrics())
    engine.release()
    assert engine.take_metrics().results()["timing_s/kv_give"] > 0
