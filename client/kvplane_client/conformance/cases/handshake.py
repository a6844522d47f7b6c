"""What an executor says of itself, the memory profile, and the making of a cache."""

from __future__ import annotations

import grpc
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.target import MAX_SEQS

TOPIC = Topic("handshake")

_INVALID, _PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
_LIMITS = "ExecutorService.ProfileMemory: Errors: INVALID_ARGUMENT for limits below 1"
_KEPT = "ExecutorService.ProfileMemory: The result is kept and returned again for the same limits."
_OTHER_LIMITS = (
    "ExecutorService.ProfileMemory: Under other limits than those the cache was made for, the cache is gone."
)
_SIZES = "ExecutorService.InitializeKvCache: INVALID_ARGUMENT for more blocks than were reported."
_SIZES_UNKNOWN = (
    "ExecutorService.InitializeKvCache: FAILED_PRECONDITION, GROUP_BLOCK_SIZES_UNKNOWN, without "
    "knows_group_block_sizes where a group has a block size of its own."
)
_NEW_EPOCH = "ExecutorService.InitializeKvCache: InitializeKvCache allocates the cache and starts a new epoch"


@TOPIC.case("ExecutorService.GetModelInfo: GetModelInfo describes the model, its KV groups and the state of the cache.")
async def model_info(bench: Bench) -> None:
    """Every field of GetModelInfo has a value that makes sense."""
    info = await bench.call(bench.stub.GetModelInfo(pb.GetModelInfoRequest()))
    for name in ("executor_id", "model_name", "model_fingerprint", "backend", "device", "dtype", "kv_cache_dtype"):
        field = f"GetModelInfoResponse.{name}: {name} is"
        bench.true(bool(getattr(info, name)), field, f"a {name}", "nothing")
    bench.true(
        info.max_model_len >= 1,
        "GetModelInfoResponse.max_model_len: max_model_len is the most tokens of a sequence.",
        "at least 1",
        info.max_model_len,
    )
    bench.true(
        0 <= info.max_logprobs <= info.vocab_size,
        "GetModelInfoResponse.max_logprobs: max_logprobs is the most top log probabilities a row may ask for.",
        f"0 to {info.vocab_size}",
        info.max_logprobs,
    )
    for name, contract in (
        ("max_adapters", "GetModelInfoResponse.max_adapters: 0 for none"),
        ("tensor_parallel_size", "GetModelInfoResponse.tensor_parallel_size: At least 1; 0 is from an executor that "
         "does not say."),
    ):  # fmt: skip
        bench.true(getattr(info, name) >= 0, contract, "at least 0", getattr(info, name))
    good = all(0 <= token < info.vocab_size for token in info.eos_token_ids)
    bench.true(
        good,
        "GetModelInfoResponse.vocab_size: vocab_size is the number of token ids.",
        f"eos_token_ids in [0, {info.vocab_size})",
        list(info.eos_token_ids),
    )
    for group in info.kv_groups:
        sizes = (group.num_layers, group.bytes_per_block)
        bench.true(min(sizes) >= 1, "KvGroup.bytes_per_block: bytes_per_block is bytes one block takes over all layers "
                   "of the group.", "layers and bytes of at least 1", sizes)  # fmt: skip
        heads = (group.num_kv_heads, group.head_dim)
        if group.type == pb.KV_GROUP_TYPE_RECURRENT_STATE:
            contract = (
                "KvGroup.num_kv_heads: num_kv_heads is K/V heads per layer, 0 with KV_GROUP_TYPE_RECURRENT_STATE."
            )
            bench.equal(heads, (0, 0), contract)
        else:
            bench.true(min(heads) >= 1, "KvGroup.head_dim: head_dim is elements per head",
                       "heads and head_dim of at least 1", heads)  # fmt: skip
        contract = "KvGroup.block_size: 0 means GetModelInfoResponse.block_size."
        bench.true(group.block_size >= 0, contract, "at least 0", group.block_size)
        if group.type != pb.KV_GROUP_TYPE_SLIDING_WINDOW:
            bench.equal(group.window, 0, "KvGroup.window: At least 1 there, 0 for other types.")
        if group.type != pb.KV_GROUP_TYPE_CHUNKED_LOCAL:
            bench.equal(group.chunk, 0, "KvGroup.chunk: At least 1 there, 0 for other types.")


@TOPIC.case("GetModelInfoResponse.executor_id: executor_id is unique to one run of the executor.")
async def model_info_stays(bench: Bench) -> None:
    """Asked twice, it says the same."""
    first = await bench.call(bench.stub.GetModelInfo(pb.GetModelInfoRequest()))
    second = await bench.call(bench.stub.GetModelInfo(pb.GetModelInfoRequest()))
    bench.equal(second, first, "GetModelInfoResponse.executor_id: executor_id is unique to one run of the executor.")


@TOPIC.case("GetModelInfoResponse.tokenizer_files: tokenizer_files are the tokenizer's files, when asked for.")
async def tokenizer_files(bench: Bench) -> None:
    """Tokenizer files come when they are asked for, under plain names."""
    without = await bench.call(bench.stub.GetModelInfo(pb.GetModelInfoRequest()))
    contract = "GetModelInfoResponse.tokenizer_files: tokenizer_files are the tokenizer's files, when asked for."
    bench.equal(len(without.tokenizer_files), 0, contract)
    request = pb.GetModelInfoRequest(include_tokenizer_files=True)
    names = [file.name for file in (await bench.call(bench.stub.GetModelInfo(request))).tokenizer_files]
    plain = all(name and "/" not in name and "\\" not in name for name in names)
    bench.true(plain, "TokenizerFile.name: name is a plain file name", "names without folders", names)


@TOPIC.case("ProfileMemoryResponse: num_blocks = available / bytes_per_block.")
async def profile_adds_up(bench: Bench) -> None:
    """The terms of the profile give the number of blocks."""
    profile = bench.target.profile
    contract = "ProfileMemoryResponse.bytes_per_block: bytes_per_block is the size of one block, of whichever group."
    for group in bench.info.kv_groups:
        bench.equal(profile.bytes_per_block, group.bytes_per_block, contract)
    contract = "ProfileMemoryResponse.utilization: utilization is the share of it the executor may use, in (0, 1]."
    bench.true(0 < profile.utilization <= 1, contract, "a number in (0, 1]", profile.utilization)
    if not profile.overridden:
        # What host blocks take counts where they lie in the cache's own memory, which the executor alone knows.
        left = profile.utilization * profile.total_bytes - profile.peak_bytes
        terms = (left, left - profile.num_host_blocks * profile.bytes_per_block)
        adds_up = any(abs(profile.available_bytes - term) <= 1 for term in terms)
        contract = "ProfileMemoryResponse: available = utilization * total - peak - host"
        bench.true(adds_up, contract, " or ".join(f"{term:.0f}" for term in terms), profile.available_bytes)
        fits = profile.available_bytes // profile.bytes_per_block
        bench.equal(profile.num_blocks, fits, "ProfileMemoryResponse: num_blocks = available / bytes_per_block.")


@TOPIC.case(_KEPT)
async def profile_is_kept(bench: Bench) -> None:
    """The same limits give the same profile, and leave the cache alone."""
    limits = pb.ProfileMemoryRequest(max_num_batched_tokens=bench.target.max_batched_tokens, max_num_seqs=MAX_SEQS)
    track = bench.track(bench.block_size + 1)
    stream = bench.stream()
    await stream.prefill(track)
    again = await bench.call(bench.stub.ProfileMemory(limits))
    bench.equal(again, bench.target.profile, _KEPT)
    await stream.decode(track, 1)


@TOPIC.case(_LIMITS)
async def profile_of_nothing(bench: Bench) -> None:
    """Limits below 1 are refused, and nothing is lost."""
    track = bench.track(bench.block_size + 1)
    await bench.stream().prefill(track)
    for tokens, seqs in ((0, MAX_SEQS), (bench.target.max_batched_tokens, 0), (-1, -1)):
        request = pb.ProfileMemoryRequest(max_num_batched_tokens=tokens, max_num_seqs=seqs)
        await bench.refused(bench.stub.ProfileMemory(request), _INVALID, _LIMITS)
    await bench.unharmed(track)


@TOPIC.case(_OTHER_LIMITS)
async def profile_under_other_limits(bench: Bench) -> None:
    """Other limits end the cache: steps are refused until another is made."""
    limits = pb.ProfileMemoryRequest(max_num_batched_tokens=bench.target.max_batched_tokens, max_num_seqs=MAX_SEQS - 1)
    await bench.call(bench.stub.ProfileMemory(limits))
    bench.true(await bench.cache() is None, _OTHER_LIMITS, "no kv_cache in GetModelInfo", "one")
    stream = bench.stream()
    await stream.send(bench.track(1).next())
    await stream.error(_PRECONDITION, "ExecutorService.Execute: FAILED_PRECONDITION without a cache")
    contract = "ExecutorService.ListBlockTags: Errors: FAILED_PRECONDITION without a cache"
    await _refused_tags(bench, _PRECONDITION, contract)
    reset = bench.stub.Reset(pb.ResetRequest(kv_epoch=bench.epoch))
    await bench.refused(reset, _PRECONDITION, "ExecutorService.Reset: Errors: FAILED_PRECONDITION without a cache")


@TOPIC.case(_SIZES)
async def initialize_too_many_or_too_few(bench: Bench) -> None:
    """More blocks than were reported are refused, and fewer than two."""
    profile = bench.target.profile
    contract = (
        "InitializeKvCacheRequest.num_blocks: num_blocks is the number of blocks, the null block (id 0) included: 2 to "
        "ProfileMemoryResponse.num_blocks."
    )
    for num_blocks, sentence in ((profile.num_blocks + 1, _SIZES), (1, contract), (0, contract), (-1, contract)):
        request = pb.InitializeKvCacheRequest(num_blocks=num_blocks, knows_group_block_sizes=True)
        await bench.refused(bench.stub.InitializeKvCache(request), _INVALID, sentence)
    contract = (
        "InitializeKvCacheRequest.num_host_blocks: num_host_blocks is the number of host blocks: 0 to "
        "ProfileMemoryResponse.num_host_blocks."
    )
    for num_host_blocks in (profile.num_host_blocks + 1, -1):
        request = pb.InitializeKvCacheRequest(
            num_blocks=2, num_host_blocks=num_host_blocks, knows_group_block_sizes=True
        )
        await bench.refused(bench.stub.InitializeKvCache(request), _INVALID, contract)


@TOPIC.case(_NEW_EPOCH)
async def initialize_starts_an_epoch(bench: Bench) -> None:
    """Every cache has an epoch of its own, and the sizes that were asked for."""
    seen = {bench.epoch}
    for num_blocks in (2, 3, 3):
        request = pb.InitializeKvCacheRequest(num_blocks=num_blocks, knows_group_block_sizes=True)
        state = (await bench.call(bench.stub.InitializeKvCache(request))).kv_cache
        contract = (
            "KvCacheState.kv_epoch: kv_epoch names the content: new, and never 0, at every initialisation and reset."
        )
        bench.true(state.kv_epoch != 0 and state.kv_epoch not in seen, contract, "an epoch not seen before",
                   state.kv_epoch)  # fmt: skip
        seen.add(state.kv_epoch)
        sizes = (state.num_blocks, state.block_size, state.num_host_blocks)
        contract = "KvCacheState.num_blocks: num_blocks is the number of blocks, the null block (id 0) included."
        bench.equal(sizes, (num_blocks, bench.info.block_size, 0), contract)
        bench.equal(await bench.cache(), state, "GetModelInfoResponse.kv_cache: kv_cache is the state of the cache.")


@TOPIC.case(_SIZES_UNKNOWN)
async def manager_that_takes_all_blocks_for_equal(bench: Bench) -> None:
    """A manager that does not say that it knows groups' own block sizes is refused where there are any."""
    unaware = pb.InitializeKvCacheRequest(num_blocks=2 * len(bench.info.kv_groups))
    tags = pb.ListBlockTagsRequest(kv_epoch=bench.epoch)
    if all(group.block_size in (0, bench.info.block_size) for group in bench.info.kv_groups):
        await bench.call(bench.stub.ListBlockTags(tags).read())
        await bench.call(bench.stub.InitializeKvCache(unaware))
        return
    cache = await bench.cache()
    await bench.refused(bench.stub.InitializeKvCache(unaware), _PRECONDITION, _SIZES_UNKNOWN)
    contract = "InitializeKvCacheRequest.knows_group_block_sizes: refuses it; others take either."
    bench.equal(await bench.cache(), cache, contract)
    contract = (
        "ListBlockTagsRequest.knows_group_block_sizes: knows_group_block_sizes is as in InitializeKvCacheRequest: who "
        "adopts a cache makes none."
    )
    await bench.refused(bench.stub.ListBlockTags(tags).read(), _PRECONDITION, contract)


async def _refused_tags(bench: Bench, code: grpc.StatusCode, contract: str) -> None:
    call = bench.stub.ListBlockTags(pb.ListBlockTagsRequest(kv_epoch=bench.epoch, knows_group_block_sizes=True))
    await bench.refused(call.read(), code, contract)
