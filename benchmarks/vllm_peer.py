"""The figures of `bench_core`, taken on vLLM's own classes; used by `bench_peer`.

Nothing of vLLM is in this repository: its unpacked source distribution is on the path of whoever runs this. Each
function does what the one of the same name in `bench_core` does, as far as vLLM's classes are told the same; where the
two differ, vLLM is asked for less.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
from pathlib import Path

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.bench_core import BLOCK_SIZE, clock, timed

MAX_MODEL_LEN = 131_072
# The smallest thing vLLM takes for a model: only its limits are read.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "bfloat16",
}


def cache_config(num_blocks: int) -> KVCacheConfig:
    """One layer of full attention over this many blocks."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def vllm_config(rows: int, num_batched_tokens: int) -> VllmConfig:
    """Limits as `bench_core.decoding` sets them, everything else vLLM's own default."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, dtype="bfloat16")
        return VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=rows,
                max_num_batched_tokens=num_batched_tokens,
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        )


class VllmPeer:
    """vLLM's classes, made ready once.

    Args:
        rows: how many requests decode.
        prompt_len: their prompts' tokens.
    """

    def __init__(self, rows: int, prompt_len: int) -> None:
        self.rows = rows
        self.prompt_len = prompt_len
        self.config = vllm_config(rows, rows * prompt_len)
        register_all_kvcache_specs(self.config)
        init_none_hash(get_hash_fn_by_name("sha256"))

    def _kv(self, num_blocks: int) -> KVCacheManager:
        return KVCacheManager(
            cache_config(num_blocks),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )

    def block_operations(self) -> dict[str, float]:
        """Get 64 blocks, free them, touch them as cached ones; seconds per block."""
        calls, count = 200, 64
        pool = BlockPool(1 + calls * count, enable_caching=True, hash_block_size=BLOCK_SIZE)
        taken = []

        def get() -> None:
            taken.extend(pool.get_new_blocks(count) for _ in range(calls))

        def free() -> None:
            for batch in taken:
                pool.free_blocks(reversed(batch))

        def touch() -> None:
            for batch in taken:
                pool.touch(batch)

        figures = {"get": timed(get)}
        for batch in taken:
            for block in batch:
                key = make_block_hash_with_group_id(block.block_id.to_bytes(32, "little"), 0)
                pool._insert_block_hash(key, block, num_tokens=BLOCK_SIZE)
        figures |= {"free": timed(free), "touch": timed(touch)}
        return {name: seconds / calls / count for name, seconds in figures.items()}

    def hashing(self, algorithm: str) -> float:
        """Hash a block of 16 tokens after its parent; seconds."""
        hash_function = get_hash_fn_by_name(algorithm)
        parent, tokens, calls = hash_function("parent"), [0] * BLOCK_SIZE, 5_000

        def body() -> None:
            for _ in range(calls):
                hash_block_tokens(hash_function, parent, tokens, None)

        return timed(body) / calls

    def admission(self, algorithm: str) -> tuple[float, float]:
        """Create, hash and admit a request of 1,024 tokens, cold and with 1,008 of them cached; seconds."""
        rng, count = random.Random(0), 50
        kv = self._kv(count * 65 + 1)
        hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name(algorithm))
        prompts = [[rng.randrange(32_000) for _ in range(1024)] for _ in range(count)]
        sampling = SamplingParams(max_tokens=16)
        admitted: list[Request] = []

        def admit() -> None:
            for index, prompt in enumerate(prompts):
                request = Request(f"r{index}", prompt, sampling, None, block_hasher=hasher)
                blocks, num_computed, _ = kv.get_computed_blocks(request)
                if kv.allocate_slots(request, 1024 - num_computed, num_computed, blocks) is None:
                    raise MemoryError("the pool holds all of them")
                admitted.append(request)

        gc.collect()  # as in `bench_core`
        cold = timed(admit) / count
        for request in admitted:
            kv.free(request)
        gc.collect()
        return cold, timed(admit) / count

    def allocation(self) -> float:
        """allocate_slots for a request that decodes; seconds."""
        steps = 4096
        kv = self._kv(1000)
        hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name("sha256"))
        request = Request("r", [1] * 1024, SamplingParams(max_tokens=8192), None, block_hasher=hasher)
        kv.allocate_slots(request, 1024)

        def body() -> None:
            for num_computed in range(1024, 1024 + steps):
                request.num_computed_tokens = num_computed
                kv.allocate_slots(request, 1)

        return timed(body) / steps

    def decoding(self, steps: int, *, queued_ahead: bool) -> float:
        """schedule() + update_from_output() with all requests decoding; seconds per step.

        Args:
            steps: how many are timed.
            queued_ahead: whether one step is queued ahead, as in `bench_core`: vLLM's own `AsyncScheduler`.
        """
        rng, rows = random.Random(0), self.rows
        num_blocks = rows * (self.prompt_len // BLOCK_SIZE + steps // BLOCK_SIZE + 4)
        self.config.cache_config.num_gpu_blocks = num_blocks
        kind = AsyncScheduler if queued_ahead else Scheduler
        scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=cache_config(num_blocks),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=False,
            structured_output_manager=StructuredOutputManager(self.config),
        )
        hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name("sha256"))
        sampling = SamplingParams(max_tokens=100_000, ignore_eos=True)
        for index in range(rows):
            prompt = [rng.randrange(32_000) for _ in range(self.prompt_len)]
            scheduler.add_request(Request(f"r{index}", prompt, sampling, None, block_hasher=hasher))
        outstanding = [scheduler.schedule()]
        if not queued_ahead:
            scheduler.update_from_output(outstanding[0], result_of(outstanding.pop()))
        spent = 0.0
        for _ in range(steps):
            start = clock()
            outstanding.append(scheduler.schedule())
            middle = clock()
            step = outstanding.pop(0)
            result = result_of(step)
            resumed = clock()
            scheduler.update_from_output(step, result)
            spent += clock() - resumed + middle - start
        if step.total_num_scheduled_tokens != rows:
            raise AssertionError(f"expected {rows} decoding requests, got {step.total_num_scheduled_tokens} tokens")
        return spent / steps


def result_of(step: SchedulerOutput) -> ModelRunnerOutput:
    """A result a model runner could have given."""
    names = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
    )
