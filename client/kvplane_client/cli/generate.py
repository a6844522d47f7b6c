"""``kvplane generate``: one prompt in, its continuation out."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from kvplane_client.cli import options as opt
from kvplane_client.cli.output import err_console, escaped, print_json, write_text
from kvplane_client.cli.session import EXIT_ERROR, generation_session
from kvplane_client.cli.values import integer, text
from kvplane_client.client import SyncGenerationStream
from kvplane_client.types import (
    ChatMessage,
    Chunk,
    Completion,
    CompletionBuilder,
    FinishReason,
    Prompt,
)

__all__ = ["ABORTED", "DEFAULT_MAX_TOKENS", "generate", "print_usage", "stream_out"]

ABORTED = "aborted: somebody ended the request; its output is not complete"

DEFAULT_MAX_TOKENS = 256

_HELP = f"""Continue a prompt.

Text streams to stdout as it is produced; Ctrl-C aborts the request on the
server. The prompt is the argument or, without one, standard input. A model
without a tokenizer takes and gives token ids.

The output ends with the model's end-of-sequence token, with --stop, or after
-n tokens, {DEFAULT_MAX_TOKENS} if nothing is said.

Examples:

  kvplane generate "The capital of France is" --temperature 0 -n 16

  kvplane generate --chat "Name three rivers." --system "Be brief."

  cat article.txt | kvplane generate -n 200 --stop "###"

  kvplane generate "Hello" --retention :512=80 --retention decode=-50/60

  kvplane generate "Hello" --json | jq -r .text       (an object a chunk)

  kvplane generate "Hello" --json --no-stream | jq .usage     (one in all)

  kvplane generate "Once upon a time" -N 3 -n 40   (computed once)
"""


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help='Text to continue; "-" or nothing reads stdin.')
    ] = None,
    *,
    chat: Annotated[
        bool, typer.Option("--chat", metavar="", help="Treat the prompt as a user message of a chat.")
    ] = False,
    system: opt.System = None,
    token_ids: Annotated[
        str | None, typer.Option("--token-ids", metavar="IDS", help='Prompt as token ids, such as "1,2,3".')
    ] = None,
    num_outputs: Annotated[
        int,
        typer.Option(
            "--num-outputs", "-N", metavar="N", parser=integer(1, 128, advice="1 is usual"),
            help="Outputs for the prompt, each shown when it is complete.",
        ),
    ] = 1,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", metavar="", help="Print pieces as they come.")
    ] = True,
    usage: opt.Usage = False,
    as_json: opt.JsonFlag = False,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    logit_bias: opt.LogitBias = None,
    seed: opt.Seed = None,
    logprobs: opt.Logprobs = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    stop: opt.Stop = None,
    stop_token_id: opt.StopTokenId = None,
    ignore_eos: opt.IgnoreEos = False,
    include_stop: opt.IncludeStop = False,
    priority: opt.Priority = 0,
    retention_priority: opt.RetentionPriority = 0,
    retention: opt.RetentionParts = None,
    cache_salt: opt.CacheSalt = None,
    tenant: opt.Tenant = None,
    adapter: opt.Adapter = None,
    request_id: Annotated[
        str | None,
        typer.Option(
            "--request-id", metavar="NAME", parser=text(0, 256, advice="shorten it"),
            help="Name for `kvplane abort` and `kvplane requests`. Default: a random one.", rich_help_panel="Request",
        ),
    ] = None,
    deadline: opt.Deadline = None,
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
) -> None:  # fmt: skip
    """Continue a prompt; the help text is _HELP."""
    full_prompt = _prompt(prompt, token_ids, chat, system)
    options = opt.chosen(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        seed=seed,
        logprobs=logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=stop_token_id,
        ignore_eos=ignore_eos,
        include_stop=include_stop,
        priority=priority,
        retention_priority=retention_priority,
        retention=retention,
        cache_salt=cache_salt,
        tenant=tenant,
        adapter=adapter,
        request_id=request_id,
        deadline=deadline,
        n=num_outputs if num_outputs > 1 else None,
    )
    options.setdefault("max_tokens", max(DEFAULT_MAX_TOKENS, min_tokens or 0))
    with (
        generation_session(server, as_json=as_json, wait=wait) as (client, model),
        client.stream(full_prompt, **options) as output,
    ):
        if num_outputs > 1:
            last = outputs_out(output, num_outputs, as_json=as_json, stream=stream, as_ids=not model.has_tokenizer)
        else:
            last = stream_out(output, as_json=as_json, stream=stream, as_ids=not model.has_tokenizer)
    if last is None:
        return
    if usage:
        print_usage(last)
    if last.finish_reason is FinishReason.ABORT:
        if not as_json:
            err_console().print(f"[bold red]error:[/bold red] {ABORTED}")
        raise typer.Exit(EXIT_ERROR)
    if max_tokens is None and not as_json and last.finish_reason is FinishReason.LENGTH:
        assert last.usage is not None, "the last chunk carries usage"
        if last.usage.completion_tokens == options["max_tokens"]:
            err_console().print(f"[dim]ended after {options['max_tokens']} tokens; -n N sets another limit[/dim]")


generate.__doc__ = _HELP


def stream_out(output: SyncGenerationStream, *, as_json: bool, stream: bool, as_ids: bool = False) -> Chunk | None:
    """Prints an output as it comes, or at its end, and returns its last chunk.

    Args:
        output: The output.
        as_json: Print JSON.
        stream: Print pieces as they come.
        as_ids: Print token ids in place of text, of which a model without a tokenizer has none.
    """
    builder, last, ends_line = CompletionBuilder(), None, True
    try:
        for chunk in output:
            builder.add(chunk)
            last = chunk
            if not stream:
                continue
            if as_json:
                print_json(chunk)
            elif piece := _shown(chunk, as_ids):
                ends_line = piece.endswith("\n")  # first: an interrupt may come right after the piece
                write_text(piece)
        if not stream:
            completion = builder.build()
            if as_json:
                print_json(completion)
            else:
                whole = _shown(completion, as_ids)
                ends_line = whole.endswith("\n")
                write_text(whole)
    finally:
        if not ends_line:  # what comes next may be an error's message
            write_text("\n")
    return last


def outputs_out(
    output: SyncGenerationStream, num_outputs: int, *, as_json: bool, stream: bool, as_ids: bool = False
) -> Chunk | None:
    """Prints several outputs, each when it is complete, and returns the last chunk: its usage is that of all of them.

    Args:
        output: The outputs.
        num_outputs: How many there are.
        as_json: Print JSON: pieces as they come, or whole outputs.
        stream: With JSON, print pieces.
        as_ids: Print token ids in place of text.
    """
    builders = [CompletionBuilder() for _ in range(num_outputs)]
    last, completion_tokens = None, 0
    for chunk in output:
        builders[chunk.index].add(chunk)
        last = chunk
        if as_json and stream:
            print_json(chunk)
        if chunk.finish_reason is None:
            continue
        completion = builders[chunk.index].build()
        completion_tokens += completion.usage.completion_tokens
        if as_json and not stream:
            print_json(completion)
        elif not as_json:
            text = _shown(completion, as_ids)
            write_text(f"[{chunk.index}] {text}" + ("" if text.endswith("\n") else "\n"))
    if last is None or last.usage is None:
        return last
    return replace(last, usage=replace(last.usage, completion_tokens=completion_tokens))


def _shown(piece: Chunk | Completion, as_ids: bool) -> str:
    return "".join(f"{token_id} " for token_id in piece.token_ids) if as_ids else piece.text


def _prompt(prompt: str | None, token_ids: str | None, chat: bool, system: str | None) -> Prompt:
    """Puts the prompt together from the argument, the flags and standard input."""
    if token_ids is not None:
        if prompt is not None or chat or system is not None:
            raise typer.BadParameter("--token-ids is a prompt of its own: give it without PROMPT, --chat and --system")
        return opt.parse_token_ids(token_ids)
    if prompt in (None, "-"):
        if prompt is None and sys.stdin.isatty():
            raise typer.BadParameter('expected a PROMPT, or text on stdin; try: kvplane generate "Hello"')
        prompt = sys.stdin.read()
    if not prompt:
        raise typer.BadParameter("the prompt is empty")
    if not chat and system is None:
        return prompt
    opening = [ChatMessage("system", system)] if system is not None else []
    return [*opening, ChatMessage("user", prompt)]


def print_usage(last: Chunk) -> None:
    """Prints what the last chunk tells of the whole, on stderr."""
    assert last.usage is not None, "the last chunk carries usage"
    assert last.finish_reason is not None, "the last chunk carries the finish reason"
    counts = last.usage
    err_console().print(
        f"[dim]{last.finish_reason} · {counts.prompt_tokens} prompt tokens ({counts.cached_tokens} cached) · "
        f"{counts.completion_tokens} completion tokens · {escaped(last.request_id)}[/dim]"
    )
