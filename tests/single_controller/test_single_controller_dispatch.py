"""Split and collect with 1, 2 and 3 ranks: the number of ranks must not show in the result."""

from dataclasses import dataclass

import numpy as np
import pytest
import ray_groups
import torch

from verl.errors import ConfigError, DataflowError
from verl.metrics import Metrics
from verl.protocol import DataProto, padding_rows
from verl.single_controller import (
    Dispatch,
    DispatchMode,
    Execute,
    Worker,
    WorkerGroup,
    get_predefined_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)

RANKS = pytest.mark.parametrize("world_size", [1, 2, 3])
KIND = ["local"]


@pytest.fixture(scope="module", params=["local", "ray"], autouse=True)
def kind(request):
    """Every test here runs with ranks as threads of this process and with ranks as processes."""
    KIND[0] = request.param
    yield request.param
    ray_groups.close()


def rows(count: int, ids: bool = True) -> DataProto:
    mask = torch.ones(count, 4, dtype=torch.int64).tril(1) if count else torch.ones(0, 4, dtype=torch.int64)
    tensors = {"x": torch.arange(count * 4.0).reshape(count, 4), "response_mask": mask}
    return DataProto.from_dict(tensors, {"uid": [f"u{row}" for row in range(count)]} if ids else None, {"t": 0.7})


@dataclass
class StridedPlan:
    """Rows dealt out one by one; each rank's share also says how many rows there are in all."""

    count: int

    def split(self, world_size: int) -> list[tuple[np.ndarray, str]]:
        return [(np.arange(rank, self.count, world_size), f"{rank}/{self.count}") for rank in range(world_size)]


class Calculator(Worker):
    def __init__(self, offset: float = 0.0):
        self.offset = offset
        self.rank_at_start = self.rank
        self.modes: list[str] = []

    def enter_mode(self, mode: str) -> None:
        self.modes.append(mode)

    @register(Dispatch.DP_COMPUTE_PROTO, mode="train")
    def total(self, batch: DataProto, scale: float = 1.0) -> DataProto:
        """Adds up every row, and the masked values of the whole batch."""
        mask = batch.batch["response_mask"].bool()
        whole = torch.where(mask, batch.batch["x"], 0.0).sum()
        tokens = mask.sum()
        self.comm.all_reduce_sum([whole, tokens])
        out = {"sum": batch.batch["x"].sum(1) * scale + self.offset}
        meta = {"whole": whole.item(), "tokens": tokens.item()}
        return DataProto.from_dict(out, {"uid": batch.non_tensor_batch["uid"]}, meta)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def no_ids(self, batch: DataProto, times: int) -> DataProto:
        return batch.select(["x"], []).repeat(times)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def first_row_only(self, batch: DataProto) -> DataProto:
        return batch.select(["x"], [])[:1]

    @register(Dispatch.DP_COMPUTE_PROTO, mode="rollout")
    def expand(self, batch: DataProto, n: int) -> DataProto:
        """n samples a prompt; rows that only fill the shard are not worth generating for."""
        batch = batch.select_idxs(~padding_rows(batch)) if self.rank % 2 else batch
        out = batch.select([], ["uid"]).repeat(n)
        ids = [f"{uid}/{number % n}" for number, uid in enumerate(out.non_tensor_batch["uid"])]
        return DataProto.from_dict({"r": torch.ones(len(out))}, {"uid": out.non_tensor_batch["uid"], "sample_id": ids})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def measure(self, batch: DataProto) -> Metrics:
        bag = Metrics()
        mask = batch.batch["response_mask"].bool()
        tokens = mask.sum().item()
        bag.add("mean", torch.where(mask, batch.batch["x"], 0.0).sum().item() / max(tokens, 1), weight=tokens)
        bag.add("tokens", tokens, reduce="sum")
        return bag

    @register(Dispatch.DP_PLAN)
    def update(self, batch: DataProto, plan: str, lr: float) -> Metrics:
        rank, count = plan.split("/")
        assert int(rank) == self.rank and len(batch) == len(range(self.rank, int(count), self.world_size))
        bag = Metrics()
        bag.add("sum", batch.batch["x"].sum().item(), reduce="sum")
        bag.add("lr", lr)
        return bag

    @register(Dispatch.DP_PLAN)
    def planned_rows(self, batch: DataProto, plan: str) -> DataProto:
        return batch.select([], ["uid"])

    @register(Dispatch.ONE_TO_ALL)
    def where(self, value: str) -> tuple[int, int, str]:
        return self.rank, self.world_size, value

    @register(Dispatch.ONE_TO_ALL)
    def take_column(self, batch: DataProto) -> list[str]:
        return batch.pop(["x"]).tensor_keys()

    @register(Dispatch.ONE_TO_ALL)
    def seen(self) -> tuple[list[str], int]:
        return self.modes, self.rank_at_start

    @register(Dispatch.RANK_ZERO)
    def only_first(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def only_first_too(self, value: str) -> str:
        return f"{self.rank}:{value}"

    @register()
    def own_item(self, item: int, power: int) -> int:
        return item**power

    @register(Dispatch.DP_COMPUTE)
    def own_item_too(self, item: int) -> int:
        return item + self.rank

    @register(
        {
            "dispatch_fn": lambda group, text: ([text.split()[: group.world_size]], {}),
            "collect_fn": lambda group, outputs: " ".join(outputs),
        }
    )
    def shout(self, word: str) -> str:
        return word.upper()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def nothing(self, batch: DataProto) -> None:
        return None

    @register(Dispatch.DP_COMPUTE_PROTO)
    def wrong_type(self, batch: DataProto) -> int:
        return 3

    @register(Dispatch.DP_COMPUTE_METRIC)
    def wrong_metrics(self, batch: DataProto) -> dict:
        return {"loss": 1.0}


def group(world_size: int, worker_cls: type[Worker] = Calculator, **kwargs) -> WorkerGroup:
    return ray_groups.make_group(KIND[0], worker_cls, world_size, **kwargs)


@RANKS
@pytest.mark.parametrize("count", [0, 1, 2, 9, 10])
def test_rows_are_split_padded_and_collected(world_size, count):
    data = rows(count)
    with group(world_size, offset=1.0) as workers:
        result = workers.total(data, scale=2.0)
    assert result.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    assert result.batch["sum"].equal(data.batch["x"].sum(1) * 2 + 1)
    masked = torch.where(data.batch["response_mask"].bool(), data.batch["x"], 0.0)
    assert result.meta_info["whole"] == masked.sum().item(), "rows that fill a shard must not count"
    assert result.meta_info["tokens"] == data.batch["response_mask"].sum().item()
    assert data.batch["response_mask"].equal(rows(count).batch["response_mask"]), "the caller's batch stays as it was"


@RANKS
def test_metrics_do_not_depend_on_the_ranks(world_size):
    data = rows(10)
    with group(world_size) as workers:
        result = workers.measure(data)
    mask = data.batch["response_mask"].bool()
    assert result["tokens"] == mask.sum().item()
    assert result["mean"] == pytest.approx(data.batch["x"][mask].mean().item(), rel=1e-6)


@RANKS
def test_added_rows_go_by_id_even_when_rows_multiply_or_a_rank_skips_them(world_size):
    with group(world_size) as workers:
        for data in (
            rows(10),
            rows(10).select([]),
            DataProto.from_dict(non_tensors={"uid": [f"u{r}" for r in range(10)]}),
        ):
            result = workers.expand(data, n=3)
            expected = [f"u{row}/{k}" for row in range(10) for k in range(3)]
            assert result.non_tensor_batch["sample_id"].tolist() == expected


@RANKS
def test_added_rows_go_by_place_when_there_are_no_ids(world_size):
    data = rows(10, ids=False)
    with group(world_size) as workers:
        assert workers.no_ids(data, times=2).batch["x"].equal(data.batch["x"].repeat_interleave(2, 0))
        if world_size == 3:
            with pytest.raises(DataflowError, match="keep the uid column"):
                workers.first_row_only(data)


@RANKS
def test_a_plan_decides_who_gets_which_rows(world_size):
    data = rows(10)
    with group(world_size) as workers:
        for result in (
            workers.update(data, StridedPlan(10), lr=0.5),
            workers.update(data, plan=StridedPlan(10), lr=0.5),
        ):
            assert result["sum"] == data.batch["x"].sum().item() and result["lr"] == 0.5
        uids = workers.planned_rows(data, StridedPlan(10)).non_tensor_batch["uid"].tolist()
    assert uids == [f"u{row}" for rank in range(world_size) for row in range(rank, 10, world_size)]


def test_a_plan_of_the_wrong_size_is_an_error():
    class Solo(StridedPlan):
        def split(self, world_size):
            return super().split(1)

    with group(2) as workers, pytest.raises(DataflowError, match="1 shares for 2 ranks"):
        workers.update(rows(4), Solo(4), lr=1.0)


@RANKS
def test_the_simple_modes(world_size):
    ranks = range(world_size)
    with group(world_size) as workers:
        assert workers.where("a") == [(rank, world_size, "a") for rank in ranks]
        assert workers.where(value="b") == [(rank, world_size, "b") for rank in ranks]
        assert workers.only_first() == 0
        assert workers.only_first_too("a") == "0:a"
        assert workers.own_item(list(ranks), power=[2] * world_size) == [rank**2 for rank in ranks]
        assert workers.own_item_too([10] * world_size) == [10 + rank for rank in ranks]
        assert workers.shout("ein zwei drei") == " ".join(["EIN", "ZWEI", "DREI"][:world_size])
        assert workers.nothing(rows(4)) is None
        data = rows(2)
        assert workers.take_column(data) == [["x"]] * world_size
        assert "x" in data.tensor_keys(), "what a rank takes out of its batch stays in the caller's"


def test_arguments_by_rank_must_have_one_item_a_rank():
    with group(2) as workers:
        with pytest.raises(DataflowError, match=r"Calculator.own_item: argument 'power' .* 2 ranks, got 3"):
            workers.own_item([1, 2], power=[1, 2, 3])
        with pytest.raises(DataflowError, match=r"argument 0 .* got a int"):
            workers.own_item_too(1)


def test_two_batches_of_one_call_must_fit():
    with group(2) as workers, pytest.raises(DataflowError, match=r"different row counts: \[2, 4\]"):
        workers.total(rows(4), rows(2))


def test_results_of_the_wrong_type_are_errors():
    with group(2) as workers:
        with pytest.raises(DataflowError, match=r"must return a DataProto .* rank 0 gave 3"):
            workers.wrong_type(rows(2))
        with pytest.raises(DataflowError, match="must return Metrics"):
            workers.wrong_metrics(rows(2))


@RANKS
def test_mode_is_entered_on_every_rank_before_the_call(world_size):
    with group(world_size) as workers:
        workers.expand(rows(3), n=1)
        workers.total(rows(3))
        workers.measure(rows(3))
        assert workers.seen() == [(["rollout", "train"], rank) for rank in range(world_size)]


def test_own_dispatch_modes(kind):
    built_in = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)
    mode = register_dispatch_mode(
        f"REVERSED_{kind}", lambda group, data: built_in["dispatch_fn"](group, data[::-1]), built_in["collect_fn"]
    )
    assert getattr(Dispatch, f"REVERSED_{kind}") is mode

    class Echo(Worker):
        @register(mode)
        def echo(self, batch: DataProto) -> DataProto:
            return batch

    with group(2, Echo) as workers:
        assert workers.echo(rows(3)).non_tensor_batch["uid"].tolist() == ["u2", "u1", "u0"]
        update_dispatch_mode(mode, built_in["dispatch_fn"], lambda group, outputs: len(outputs))
        assert workers.echo(rows(3)) == 2
    with pytest.raises(ConfigError, match="no dispatch mode 'NOWHERE'"):
        get_predefined_dispatch_fn(DispatchMode("NOWHERE"))
    with pytest.raises(ConfigError, match="exists already"):
        register_dispatch_mode("DP_PLAN", len, len)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dispatch_mode": "ONE_TO_ALL"},
        {"dispatch_mode": {"dispatch_fn": len}},
        {"execute_mode": "all"},
        {"mode": "sleep"},
        {"streaming": True, "blocking": False},
    ],
)
def test_register_refuses_what_it_does_not_know(arguments):
    with pytest.raises(ConfigError, match="@register"):
        register(**arguments)
