"""RayWorkerGroup beyond split and collect: errors, futures, streams, places, and processes that die or stall."""

from __future__ import annotations

import os
import sys
import time

import psutil
import pytest
import ray_groups
import torch
from ray_players import Player, Second

from verl import notices
from verl.comm import CommError
from verl.errors import ConfigError, DataError, DataflowError, MissingDependencyError, WorkerDiedError
from verl.protocol import DataProto
from verl.single_controller.ray import HostSettings, RayResourcePool, RayWorkerGroup, check_room, faults, hosts
from verl.single_controller.ray.cluster import import_ray
from verl.single_controller.ray.wire import pack, unpack


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    os.environ["VERL_TEST"] = "from the controller"
    yield ray_groups.cluster()
    ray_groups.close()
    del os.environ["VERL_TEST"]


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(hosts, "GRACE_S", 1.0)


def group(**kwargs) -> RayWorkerGroup:
    """Two ranks in processes that tests share, as long as none ends them."""
    return ray_groups.make_group("ray", Player, 2, **kwargs)


def own_group(tmp_path=None, **options) -> RayWorkerGroup:
    """Two ranks in processes of their own."""
    folder = None if tmp_path is None else str(tmp_path)
    settings = HostSettings(setup=ray_groups.one_thread, timeout_s=60, log_folder=folder)
    pool = RayResourcePool([2], "mine", cluster=ray_groups.cluster(), settings=settings, **options)
    return RayWorkerGroup(Player, resource_pool=pool)


def prompts(count: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(count)}, {"uid": [f"u{row}" for row in range(count)]})


def uids(pieces: list[DataProto]) -> list[str]:
    return sorted(uid for piece in pieces for uid in piece.non_tensor_batch["uid"])


def test_errors_are_the_original_with_rank_and_method_and_its_traceback():
    with group() as workers:
        with pytest.raises(DataError, match="row 7 has no answer") as caught:
            workers.fail(1)
        assert caught.value.__notes__ == ["in Player.fail on rank 1 of 2"]
        assert "ray_players.py" in str(caught.value.__cause__)
        with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
            workers.fail_strangely()
        assert workers.meet() == [1, 1], "the group works on after an error that nobody waits for"
    with pytest.raises(DataError, match="no such model") as caught:
        group(fail_on=-3)
    assert "in Player.__init__ on rank 1 of 2" in caught.value.__notes__


def test_rank_environment_and_output(tmp_path):
    with own_group(tmp_path) as workers:
        first, second = workers.environment()
        assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "1", "1")
        assert {e["WORLD_SIZE"] for e in (first, second)} == {e["LOCAL_WORLD_SIZE"] for e in (first, second)} == {"2"}
        assert first["MASTER_ADDR"] == second["MASTER_ADDR"] and first["MASTER_PORT"] == second["MASTER_PORT"]
        assert first["VERL_TEST"] == "from the controller"
        processes = workers.process()
        assert (tmp_path / "mine-rank0.log").exists() and (tmp_path / "mine-rank1.log").exists()
    assert len(set(processes)) == 2 and os.getpid() not in processes
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in processes):
        assert time.monotonic() < deadline, "processes outlive their group"
        time.sleep(0.1)


def test_roles_in_the_same_processes_share_the_process_group_and_take_turns():
    with group() as workers:
        second = RayWorkerGroup(Second, hosts=workers.hosts)
        assert second.process() == workers.process()
        assert second.meet() == [[0, 1]] * 2 and workers.meet() == [1, 1]
        with pytest.raises(ConfigError, match="a role 'Second' in the processes"):
            RayWorkerGroup(Second, hosts=workers.hosts)
        stream = workers.generate(prompts(4))
        next(stream)
        with pytest.raises(DataflowError, match=r"Second.meet was called while the group still streams Player"):
            second.meet()
        assert len(list(stream)) == 3
        second.shutdown()
        assert workers.meet() == [1, 1]


def test_futures_chain_and_keep_the_order_of_calls():
    with group() as workers:
        first = workers.slow_double(prompts(5))
        second = workers.slow_double(first)
        assert not first.done()
        assert workers.history() == [(["double"] * 2, 0)] * 2, "a blocking call comes after those made before"
        assert second.get().batch["x"].tolist() == [0, 4, 8, 12, 16]
        failure = workers.slow_failure()
        assert workers.meet() == [1, 1]
        with pytest.raises(DataError, match="too late"):
            failure.get()


def test_streams_give_every_row_once_and_as_it_comes():
    with group() as workers:
        assert uids(list(workers.generate(prompts(9)))) == sorted(f"u{row}" for row in range(9))
        stream = workers.generate(prompts(4), slow_rank=0)
        assert uids([next(stream), next(stream)]) == ["u2", "u3"]
        assert uids(list(stream)) == ["u0", "u1"]
        with pytest.raises(DataflowError, match="registered as streaming, but returned"):
            list(workers.not_a_generator(prompts(4)))


def test_streams_end_on_every_rank_when_closed_or_when_one_fails():
    with group(fail_on=1) as workers:
        with pytest.raises(DataError, match="no more words") as caught:
            list(workers.generate(prompts(400), pause=0.005))
        assert caught.value.__notes__ == ["in Player.generate on rank 1 of 2"]
        (log, closed), (_, also) = workers.history()
        assert closed == also == 1 and len(log) < 200, "the other rank stopped too"
    with group() as workers:
        stream = workers.generate(prompts(400), pause=0.005)
        next(stream)
        stream.close()
        assert [closed for _, closed in workers.history()] == [1, 1]
        assert uids(list(workers.generate(prompts(2)))) == ["u0", "u1"]
        stream = workers.fails_when_closed(prompts(2))
        next(stream)
        with pytest.raises(DataError, match="cannot tidy up"):
            stream.close()


def test_tensors_travel_at_any_depth_and_notices_are_told_here():
    with group() as workers:
        workers.keep({"nested": [torch.ones(3000)]})
        kept = workers.kept()
        assert torch.equal(kept["value"], torch.full((3000,), 2.0)) and kept["half"].dtype == torch.bfloat16
        assert kept["array"].tolist() == [0, 1, 2, 3, 4]
        workers.tell()
        assert notices.seen().count("the ranks changed a choice") == 1


def test_messages_carry_large_arrays_beside_the_pickle():
    value = {"big": torch.randn(5000), "small": torch.arange(3), "same": None, "batch": prompts(3)}
    value["same"] = value["big"]
    packed = pack(value)
    assert len(packed.head) < 4000 and [buffer.nbytes for buffer in packed.buffers] == [20000]
    found = unpack(packed)
    assert torch.equal(found["big"], value["big"]) and found["same"] is found["big"]
    assert found["small"].tolist() == [0, 1, 2] and len(found["batch"]) == 3


def test_a_rank_waiting_for_one_that_failed_ends_the_group_in_time(short_grace):
    workers = own_group()
    began = time.monotonic()
    with pytest.raises(DataError, match="row 7"):
        workers.fail_while_others_meet(0)
    assert time.monotonic() - began < 60
    with pytest.raises(DataflowError, match=r"no more: rank\(s\) \[1\] did not come back from Player.fail_while"):
        workers.meet()
    workers.shutdown()


def test_a_rank_waiting_for_one_that_is_done_is_an_error_not_a_hang():
    workers = own_group()
    began = time.monotonic()
    with pytest.raises(CommError, match=r"alone_in_a_crowd rank\(s\) \[0\] wait in barrier for rank\(s\) \[1\]"):
        workers.alone_in_a_crowd()
    assert time.monotonic() - began < 60
    workers.shutdown()


def test_a_killed_rank_is_named_with_its_host_and_its_last_words(tmp_path):
    workers = own_group(tmp_path)
    began = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        workers.die(1)
    assert time.monotonic() - began < 30
    message = str(caught.value)
    assert message.startswith("Rank 1 of 2 (processes 'mine') on host ") and "died in Player.die" in message
    assert "rank 1 says goodbye" in message and "rank 0 says" not in message and "trainer.resume_mode=auto" in message
    assert caught.value.rank == 1 and caught.value.exit_code == 1
    with pytest.raises(DataflowError, match="are no more: Rank 1 of 2"):
        workers.meet()
    workers.shutdown()
    again = own_group()
    with pytest.raises(WorkerDiedError, match=r"died in Player\.dies_streaming"):
        list(again.dies_streaming(prompts(4)))
    again.shutdown()


def test_a_stalled_rank_is_named_with_its_stack(monkeypatch):
    monkeypatch.setattr(hosts, "LOOK_S", 0.2)
    workers = own_group(stall_after_s=0.7)
    workers.dawdle(1, 1.8)
    told = [text for text in notices.seen() if "stalls in Player.dawdle" in text]
    assert told and told[0].startswith("Rank 1 of 2 on host ") and "rank(s) [0] wait for it in barrier" in told[0]
    assert "_dream" in told[0] and not any(text.startswith("Rank 0") for text in told)
    workers.shutdown()


def test_a_rank_that_does_not_answer_is_asked_by_signal(tmp_path):
    workers = own_group(tmp_path)
    dump = faults._dump(workers.process()[1], workers.hosts.places[1].log)
    assert "most recent call first" in dump
    workers.shutdown()


def test_more_than_there_is_fails_at_once_with_both_numbers():
    began = time.monotonic()
    cluster = ray_groups.cluster()
    with pytest.raises(ConfigError, match=r"9 CPUs are asked for \(\[9\] for 'wide', by node\) and this machine has 8"):
        RayResourcePool([9], "wide", cluster=cluster).host_set()
    with pytest.raises(ConfigError, match=r"2 GPUs are asked for .* has 0: lower trainer.n_gpus_per_node"):
        RayResourcePool([2], "gpus", use_gpu=True, cluster=cluster).host_set()
    pools = [RayResourcePool([5], "a", cluster=cluster), RayResourcePool([2, 2], "b", cluster=cluster)]
    with pytest.raises(ConfigError, match=r"9 CPUs are asked for \(\[5\] for 'a' \+ \[2, 2\] for 'b', by node\)"):
        check_room(pools)
    assert time.monotonic() - began < 30


def test_what_others_hold_is_told(monkeypatch):
    monkeypatch.setattr("verl.single_controller.ray.pool.VIEW_S", 1.0)
    with own_group() as workers:
        assert workers.hosts.pool.is_open()
        with pytest.raises(ConfigError, match=r"8 CPUs are asked for .* has 8, of which [0-6] are free"):
            RayResourcePool([8], "all", cluster=ray_groups.cluster()).host_set()


def test_data_that_do_not_fit_are_an_error_not_a_hang():
    error = faults.message_failure("Player.large", import_ray().exceptions.ObjectStoreFullError("full"))
    assert "ray_kwargs.ray_init.object_store_memory" in str(error)
    with group() as workers:  # twice the store: Ray puts it on the disk
        assert [part.numel() for part in workers.large(ray_groups.STORE_BYTES)] == [ray_groups.STORE_BYTES] * 2


def test_groups_are_made_of_workers_and_need_ray(monkeypatch):
    with pytest.raises(ConfigError, match="not of 3"):
        RayWorkerGroup(3)
    with group() as workers, pytest.raises(ConfigError, match="world_size=3 does not fit"):
        RayWorkerGroup(Second, world_size=3, hosts=workers.hosts)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match="pip install ray"):
        import_ray()


def test_processes_that_do_not_start_give_their_places_back(monkeypatch):
    monkeypatch.setattr(hosts, "START_S", 0.0)
    pool = ray_groups.pool(1)
    with pytest.raises(ConfigError, match=r"rank\(s\) \[0\] did not start within 0 s"):
        pool.host_set()
    assert not pool.is_open()
