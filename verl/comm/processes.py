"""Ranks that are processes of a torch.distributed group."""

from __future__ import annotations

import datetime
import hashlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl.comm.base import Comm, CommError, check_src

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

BUCKET_BYTES = 32 << 20
"""Small tensors travel together, in pieces of at most this size."""
LOOK_EVERY_S = 0.5
"""How often a waiting rank looks whether another one has seen a failure."""
ROLL_CALL_S = 2.0
"""How long the ranks that saw a failure wait for each other before they name who is missing."""
DEFAULT_TIMEOUT_S = 600.0


class TorchDistComm(Comm):
    """One rank of a torch.distributed group. CUDA tensors go through nccl, everything else through gloo.

    Before each call the ranks compare what they are about to do, so different calls, shapes or types are a CommError
    on every rank, which they survive. When a rank is gone or does not come within the group's timeout, the others get
    a CommError that names it; the group cannot be used afterwards.

    Args:
        group: default, the one of all ranks.
        store: where the ranks of a failed call report, so that those missing can be named.
        cpu_group: a gloo group of the same ranks; made here (by all ranks of ``group`` together) where ``group``
            itself cannot move host memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        store: dist.Store | None = None,
        cpu_group: dist.ProcessGroup | None = None,
    ):
        import torch.distributed as dist

        whole = group if group is not None else dist.group.WORLD
        if whole is None:
            raise CommError("there is no process group yet: init_process_group_from makes one")
        self.group = whole
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.store = store
        self.waiting_in: str | None = None  # the call in progress, for whoever looks from another thread
        self._broken: str | None = None
        self.calls = 0
        self._flag = f"verl/failed/{self.group.group_name}"
        if cpu_group is None:
            cpu_group = self.group
            if "cpu:" not in str(dist.get_backend_config(self.group)):
                ranks = dist.get_process_group_ranks(self.group)
                cpu_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.cpu_group = cpu_group

    def all_reduce_sum(self, tensors: Sequence[torch.Tensor]) -> None:
        import torch.distributed as dist

        def reduce(flat: torch.Tensor) -> None:
            self._finish(flat, dist.all_reduce(flat, group=self._group_of(flat), async_op=True))

        self._collective("all_reduce_sum", tensors, lambda: _in_buckets(tensors, reduce))

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        import torch.distributed as dist

        check_src(src, self.world_size)
        source = dist.get_global_rank(self.group, src)

        def send(flat: torch.Tensor) -> None:
            self._finish(flat, dist.broadcast(flat, source, group=self._group_of(flat), async_op=True))

        self._collective(f"broadcast from {src}", tensors, lambda: _in_buckets(tensors, send))

    def all_gather_object(self, obj: Any) -> list[Any]:
        mine, found = pickle.dumps(obj), []
        self._collective("all_gather_object", (), lambda: found.extend(self._gather_bytes(mine)))
        return [obj if rank == self.rank else pickle.loads(data) for rank, data in enumerate(found)]

    def barrier(self) -> None:
        self._collective("barrier", (), lambda: None)  # comparing is meeting

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        import torch
        import torch.distributed as dist

        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        self._finish(sizes, dist.all_reduce(sizes, group=self.cpu_group, async_op=True))
        longest = int(sizes.max())
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        everybody = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        self._finish(padded, dist.all_gather(everybody, padded, group=self.cpu_group, async_op=True))
        return [part[:size].numpy().tobytes() for part, size in zip(everybody, sizes.tolist(), strict=True)]

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self.cpu_group if tensor.device.type == "cpu" else self.group

    def _collective(self, call: str, tensors: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        import torch

        if self._broken is not None:
            raise CommError(f"rank {self.rank} cannot call {call}: {self._broken}")
        self.calls += 1
        self.waiting_in = call
        try:
            with torch.no_grad():
                self._compare(call, tensors)
                run()
        except RuntimeError as error:
            if isinstance(error, CommError):
                raise
            self._broken = self._roll_call(call, error)
            raise CommError(f"rank {self.rank} in {call}: {self._broken}") from error
        finally:
            self.waiting_in = None

    def _compare(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        """Raise CommError on every rank unless all make the same call with tensors of the same kind."""
        import torch
        import torch.distributed as dist

        kinds = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        number = int.from_bytes(hashlib.blake2b(repr((call, kinds)).encode(), digest_size=7).digest(), "big")
        extremes = torch.tensor([number, -number])
        work = dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=self.cpu_group, async_op=True)
        self._finish(extremes, work)
        if extremes[0] == -extremes[1]:
            return
        everybody = [pickle.loads(data) for data in self._gather_bytes(pickle.dumps((call, kinds)))]
        for rank, (other_call, other_kinds) in enumerate(everybody):
            if other_call != everybody[0][0]:
                raise CommError(f"rank {rank} calls {other_call} while rank 0 is in {everybody[0][0]}")
            if other_kinds != everybody[0][1]:
                raise CommError(f"{call}: rank 0 brings {everybody[0][1]}, rank {rank} brings {other_kinds}")

    def _finish(self, tensor: torch.Tensor, work: dist.Work) -> None:
        """Wait until ``tensor`` is there, looking now and then whether another rank has seen the call fail.

        In a ring only the neighbours of a rank that died see its connection break; the others would wait on. On a GPU
        it is the stream that waits.
        """
        pause, look = 0.0, time.monotonic() + LOOK_EVERY_S
        while tensor.device.type == "cpu" and not work.is_completed():
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)
            if self.store is not None and time.monotonic() > look:
                if self.store.check([self._flag]):
                    raise RuntimeError("another rank saw the call fail")
                look = time.monotonic() + LOOK_EVERY_S
        work.wait()

    def _roll_call(self, call: str, error: RuntimeError) -> str:
        """Which ranks did not see the failure of this call, for they are gone or never came."""
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if self.store is None:
            return f"another rank is gone or did not come ({cause})"
        names = [f"{self._flag}/{self.calls}/{rank}" for rank in range(self.world_size)]
        try:
            self.store.set(self._flag, call)
            self.store.set(names[self.rank], call)
            until = time.monotonic() + ROLL_CALL_S
            while (missing := [r for r, name in enumerate(names) if not self.store.check([name])]) and (
                time.monotonic() < until
            ):
                time.sleep(0.05)
        except RuntimeError:
            return f"rank 0 is gone ({cause})"  # the store lives in its process
        if not missing:
            return f"no rank is missing, but the connection failed ({cause})"
        return f"rank(s) {missing} are gone or did not come ({cause})"


def init_process_group_from(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    device: str = "cpu",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    store: dist.Store | None = None,
) -> TorchDistComm:
    """Make this process rank ``rank`` of the default process group, which all ranks do together.

    Args:
        address, port: where rank 0 listens.
        device: "cuda" adds nccl for tensors there.
        timeout_s: after which a rank that does not come makes the others fail.
        store: rank 0's own, made before by :func:`open_store` so that its port is known to be free.

    Raises:
        CommError: the ranks did not find each other in time.
    """
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        if store is None:
            store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError as error:
        raise CommError(
            f"rank {rank} of {world_size} did not meet the others at {address}:{port} within {timeout_s:g} s: {error}"
        ) from error
    return TorchDistComm(store=store)


def open_store(address: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> dist.TCPStore:
    """Rank 0's meeting place on a free port (``.port``) of this machine."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(address, 0, is_master=True, timeout=timeout, wait_for_workers=False)


def _in_buckets(tensors: Sequence[torch.Tensor], run: Callable[[torch.Tensor], None]) -> None:
    """Call ``run`` on flat tensors that together hold ``tensors``, and copy back what it wrote."""
    import torch

    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            run(bucket[0].detach())
            continue
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        run(flat)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type on one device, up to BUCKET_BYTES together; empty tensors are left out."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        nbytes = tensor.numel() * tensor.element_size()
        alike = bucket and (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
        if bucket and (not alike or size + nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        yield bucket
