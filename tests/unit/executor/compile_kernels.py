"""Compiles the Triton kernels for GPUs that are not there, and prints what they take: one JSON object per case, behind
one of `arguments_with_variants`.

    python -m tests.unit.executor.compile_kernels [CASE...]

A process of its own: one that interprets Triton can not compile it, and tests interpret. Registers and spills are what
the target's own tools say: `cuobjdump` beside Triton for CUDA, the code object's metadata for AMD.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from executor_service.kernels.copy_blocks import copy_blocks_kernel
from executor_service.kernels.launch_shapes import MIN_SPLIT, Target, Tile, decode_tile, prefill_tile
from executor_service.kernels.paged_decode import paged_decode_kernel, reduce_block, reduce_splits_kernel
from executor_service.kernels.paged_prefill import paged_prefill_kernel
from executor_service.kernels.write_kv import write_kv_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ITEM_SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}

# Types of what is not an int32 number. The rest follows from the model's type and the cache's.
POINTERS_TO_INT32 = (
    "rows",
    "split_indptr",
    "split_rows",
    "split_numbers",
    "tile_rows",
    "tile_starts",
    "query_indptr",
    "seq_lens",
    "block_indptr",
    "block_ids",
)
FLOATS = ("scale", "v_scale", "k_scale", "softcap")
# Shapes that are compiled for decode graphs, too.
RECORDED = ("plain", "gemma", "chunks", "odd")


@dataclass(frozen=True)
class Shape:
    """What kernels are specialised for."""

    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    head_dim: int = 128
    group: int = 4
    block_size: int = 16
    window: bool = False
    chunks: bool = False
    softcap: bool = False


SHAPES = {
    "plain": Shape(),
    "small": Shape(head_dim=64, group=8),
    "odd": Shape(dtype="fp16", kv_dtype="fp16", head_dim=80, group=7, block_size=8),
    "gemma": Shape(head_dim=256, group=2, window=True, softcap=True, block_size=32),
    "chunks": Shape(window=True, chunks=True),
    "e5m2": Shape(kv_dtype="fp8e5", group=16, block_size=256),
    "e4m3": Shape(kv_dtype="fp8e4nv", group=1, block_size=128),
    "float32": Shape(dtype="fp32", kv_dtype="fp32", head_dim=64, group=3),
    "group of 3": Shape(group=3),
    "wide": Shape(head_dim=256, group=1),
}
# Shapes that make a difference to prefill alone, which has the most in registers.
PREFILL_ONLY = ("group of 3", "wide")
KERNELS = (paged_decode_kernel, reduce_splits_kernel, paged_prefill_kernel, write_kv_kernel, copy_blocks_kernel)


def target_of(target: GPUTarget) -> Target:
    """What launches on such a GPU say they run on."""
    if target.backend == "hip":
        return Target.HIP
    return Target.HOPPER if target.arch in (90, 100) else Target.CUDA


def compiled(name: str, shape: Shape, target: GPUTarget) -> Iterator[tuple[str, object]]:
    """The kernels of one shape, compiled; each of the small ones only for shapes that change it."""
    kind = target_of(target)
    sizes = {"head_dim": shape.head_dim, "group": shape.group, "itemsize": ITEM_SIZES[shape.dtype]}
    head = {"HEAD_DIM": shape.head_dim, "BLOCK_D": triton.next_power_of_2(shape.head_dim)}
    heads = head | {"NUM_KV_HEADS": 8, "GROUP": shape.group, "BLOCK_SIZE": shape.block_size}
    heads |= {"HAS_SOFTCAP": shape.softcap, "HAS_WINDOW": shape.window, "IN_CHUNKS": shape.chunks}
    small = Tile(0, 0, num_warps=4, num_stages=3)
    tile = decode_tile(kind, **sizes)
    blocks: dict[str, object] = {"BLOCK_G": tile.block_m, "BLOCK_N": tile.block_n, "SPLIT": True}
    by_host = {"CUT_HERE": False, "LEAST": MIN_SPLIT}
    by_itself = by_host | {"CUT_HERE": True}
    if name not in PREFILL_ONLY:
        yield "decode", _compile(paged_decode_kernel, shape, target, heads | blocks | by_host, tile)
    if name in RECORDED:
        yield "decode, recorded", _compile(paged_decode_kernel, shape, target, heads | blocks | by_itself, tile)
    block_n = tile.block_n
    tile = prefill_tile(kind, **sizes)
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    yield "prefill", _compile(paged_prefill_kernel, shape, target, heads | blocks, tile)
    quantise = shape.kv_dtype.startswith("fp8")
    if name == "plain" or quantise:
        limit = {"fp8e5": 57344.0, "fp8e4nv": 448.0}.get(shape.kv_dtype, 0.0)
        blocks = {"LIMIT": limit, "BLOCK_T": 16, "QUANTISE": quantise}
        yield "write", _compile(write_kv_kernel, shape, target, head | blocks, small)
    if name in ("plain", "gemma", "chunks"):
        blocks = {"NUM_HEADS": 8 * shape.group, "BLOCK_N": block_n, "HAS_WINDOW": shape.window}
        blocks |= {"IN_CHUNKS": shape.chunks}
        tile = Tile(0, 0, 4, 2)
        for kernel, cut in (("reduce", by_host), ("reduce, recorded", by_itself)):
            more = {"BLOCK_S": reduce_block(cut["CUT_HERE"])}
            yield kernel, _compile(reduce_splits_kernel, shape, target, head | blocks | cut | more, tile)
    if name == "plain":
        yield "copy", _compile(copy_blocks_kernel, shape, target, {"BLOCK": 2048, "WORD": tl.int64}, small)


def _compile(
    kernel: triton.JITFunction, shape: Shape, target: GPUTarget, constants: Mapping[str, object], tile: Tile
) -> object:
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = _type_of(name, shape)
        # What torch allocates, and strides of heads of 16 elements, are multiples of 16; of what kernels say may be
        # anything there is one variant, and no launch in the middle of a service compiles another.
        param = kernel.params[index]
        if not (param.do_not_specialize or param.do_not_specialize_on_alignment) and name not in FLOATS:
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attrs)
    return triton.compile(source, target=target, options={"num_warps": tile.num_warps, "num_stages": tile.num_stages})


def _type_of(name: str, shape: Shape) -> str:
    if name in POINTERS_TO_INT32:
        return "*i32"
    if name in FLOATS:
        return "fp32"
    if name in ("query", "out", "key", "value"):
        return f"*{shape.dtype}"
    if name in ("keys", "values"):
        return f"*{shape.kv_dtype}"
    if name in ("slots", "addresses", "source", "target"):
        return "*i64"
    return "*fp32" if name.startswith("partial") else "i32"


def usage(kernel: object, target: GPUTarget) -> dict[str, object]:
    """Registers of a thread, bytes of a thread that spilled to memory, bytes of shared memory, matrix instruction."""
    text = kernel.asm["amdgcn" if target.backend == "hip" else "ptx"]  # type: ignore[attr-defined]
    found = re.search(r"mfma|mma\.sync|wgmma|tcgen05\.mma", text)
    return _resources(kernel, target) | {"matrix": found[0] if found else ""}


def _resources(kernel: object, target: GPUTarget) -> dict[str, object]:
    shared = int(kernel.metadata.shared)  # type: ignore[attr-defined]
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]  # type: ignore[attr-defined]
        fields = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
        # Spilled scalar registers go to lanes of a vector register, not to memory.
        return {"registers": fields["vgpr_count"], "spilled": 4 * fields["vgpr_spill_count"], "shared": shared}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])  # type: ignore[attr-defined]
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"], "shared": shared}


def cases() -> list[str]:
    """Every shape on every target, but e4m3 where the hardware lacks it. Named "target shape"."""
    return [f"{target} {shape}" for target in TARGETS for shape in SHAPES if (target, shape) != ("sm_80", "e4m3")]


def arguments_with_variants() -> dict[str, list[str]]:
    """By kernel: arguments of whose alignment, divisibility or being 1 a launch makes a variant of the kernel."""
    return {
        kernel.fn.__name__: [
            param.name
            for param in kernel.params
            if not (param.is_constexpr or param.do_not_specialize or param.do_not_specialize_on_alignment)
        ]
        for kernel in KERNELS
    }


def report(case: str) -> dict[str, object]:
    """One case compiled and measured."""
    target, shape = case.split(maxsplit=1)
    kernels = {
        kernel: usage(found, TARGETS[target]) for kernel, found in compiled(shape, SHAPES[shape], TARGETS[target])
    }
    return {"case": case, "kernels": kernels}


def main() -> None:
    """Compile the cases, two at a time: most of the time is spent in ptxas, a process of its own."""
    print(json.dumps(arguments_with_variants()))
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(report, sys.argv[1:] or cases()):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
