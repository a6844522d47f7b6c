"""One process's place among the ranks: what they add up and gather while a model computes.

Station: made by `tensor_parallel.backend` in rank 0 and by `tensor_parallel.worker` in the others; used by the modules
that `tensor_parallel.sharding` puts into the model. It knows tensors; it knows no model and no call.

On a CPU the ranks exchange over gloo, on GPUs over NCCL. Both stay on the loopback interface: what they listen on
knows no password. All ranks must take part in each exchange, in one order; who does not makes the others wait until
`timeout_s`, and whose process has ended makes theirs fail at once over gloo.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["RankGroup"]

_MEETING = timedelta(hours=1)
"""How long ranks wait for one that still reads its weights. One that has ended is noticed at once."""


class RankGroup:
    """This process as one of the ranks. There is at most one in a process.

    Args:
        rank: from 0, which is the process that the manager knows.
        size: how many ranks there are.
        store: a file, or a place for one, by which they find each other.
        device: where this rank computes.
        timeout_s: seconds to wait for the others in an exchange.

    Raises:
        RuntimeError: the others are not there, as in every method.
    """

    def __init__(self, rank: int, size: int, store: Path, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
        self._patient = dist.new_group(backend="gloo", timeout=_MEETING)

    def meet(self) -> None:
        """Wait until all ranks are here, however long reading weights takes them."""
        dist.all_reduce(torch.zeros(1), group=self._patient)

    def add(self, partial: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over the ranks, the same in all of them."""
        dist.all_reduce(partial)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' tensors, of one shape, in rank 0; nothing elsewhere."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part, parts, dst=0)
        return parts or []

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over the ranks, by element. Shape: any, on the CPU; returns the same."""
        found = values.clone()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found

    def close(self) -> None:
        """Leave; over gloo what others wait for from this rank fails at once."""
        dist.destroy_process_group()
