"""Copies of whole blocks in plain torch, for CPU and CUDA.

Station: called by `backends.torch_backend` before a step runs, with copies that do not depend on each other. The oracle
is `reference.copy_blocks`.

How: all blocks of a copy at once, layer by layer. Between the cache, where a block lies scattered over the layers, and
a host block, which is one piece of memory, they pass through a workspace on the device in the host's layout: a block
crosses the bus as one transfer. On CUDA the transfers are queued on the current stream like everything else, so none
overtakes a step's kernels, and the host need not wait between them.

Memory: one index_select of one layer, and one workspace, each of at most `chunk` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_within(layers: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, chunk: int) -> None:
    """Copy blocks within the cache.

    Args:
        layers: the cache's layers, changed in place.
        source: ids of the blocks to copy, on the layers' device.
        target: where each goes; no block twice, and none of `source`.
        chunk: most blocks at a time.

    Shape:
        layers[l]: (2, num_blocks, block_size, H_kv, D); source, target: (C,) int64.
    """
    for own, other in zip(source.split(chunk), target.split(chunk), strict=True):
        for layer in layers:
            layer.index_copy_(1, other, layer.index_select(1, own))


def copy_to_host(
    layers: Sequence[torch.Tensor], host: torch.Tensor, source: torch.Tensor, target: Sequence[int], *, chunk: int
) -> None:
    """Copy blocks of the cache to host blocks. On CUDA they are there once the current stream has come so far.

    Args:
        layers: the cache's layers.
        host: the host blocks, changed in place; page-locked where the layers are on CUDA.
        source: ids of the blocks to copy, on the layers' device.
        target: the host block of each; none twice.
        chunk: most blocks at a time.

    Shape:
        layers[l]: (2, num_blocks, block_size, H_kv, D); host: (num_host_blocks, num_layers, 2, block_size, H_kv, D);
        source: (C,) int64; target: C values.
    """
    workspace = _workspace(host, min(chunk, len(target)), source.device)
    for start in range(0, len(target), chunk):
        own = source[start : start + chunk]
        for index, layer in enumerate(layers):
            torch.index_select(layer, 1, own, out=workspace[: len(own), index].transpose(0, 1))
        for place, block_id in enumerate(target[start : start + chunk]):
            host[block_id].copy_(workspace[place], non_blocking=True)


def copy_from_host(
    layers: Sequence[torch.Tensor], host: torch.Tensor, source: Sequence[int], target: torch.Tensor, *, chunk: int
) -> None:
    """Copy host blocks to blocks of the cache. On CUDA the host blocks are read as the current stream comes so far.

    Args:
        layers: the cache's layers, changed in place.
        host: the host blocks; page-locked where the layers are on CUDA.
        source: the host blocks to copy.
        target: where each goes, on the layers' device; no block twice.
        chunk: most blocks at a time.

    Shape:
        as in `copy_to_host`; source: C values; target: (C,) int64.
    """
    workspace = _workspace(host, min(chunk, len(source)), target.device)
    for start in range(0, len(source), chunk):
        other = target[start : start + chunk]
        for place, block_id in enumerate(source[start : start + chunk]):
            workspace[place].copy_(host[block_id], non_blocking=True)
        for index, layer in enumerate(layers):
            layer.index_copy_(1, other, workspace[: len(other), index].transpose(0, 1))


def _workspace(host: torch.Tensor, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Room for blocks on the device. Shape: (num_blocks, num_layers, 2, block_size, H_kv, D)."""
    return torch.empty((num_blocks, *host.shape[1:]), dtype=host.dtype, device=device)
