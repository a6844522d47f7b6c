"""``kvplane generate``: one prompt in, its continuation out."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from kvplane_client.cli import options as opt
from kvplane_client.cli.option_panel import Panel
from kvplane_client.cli.output import err_console, escaped, print_json, write_text
from kvplane_client.cli.prompt_input import ids_or_text
from kvplane_client.cli.request_options import with_request_options
from kvplane_client.cli.session import EXIT_ERROR, CommandError, generation_session
from kvplane_client.client import SyncGenerationStream
from kvplane_client.types import (
    ChatMessage,
    Chunk,
    Completion,
    CompletionBuilder,
    FinishReason,
    GenerateOptions,
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


_GENERAL, _REQUEST = Panel(), Panel("Request")
_PromptText = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help='Text to continue; "-" or nothing reads stdin.')
]
_Chat = Annotated[bool, _GENERAL.option("--chat", "Treat the prompt as a user message of a chat.")]
_TokenIds = Annotated[str | None, _GENERAL.option("--token-ids IDS", 'Prompt as token ids, such as "1,2,3".')]
_NumOutputs = Annotated[
    int,
    _GENERAL.integer(
        "--num-outputs -N N",
        "Outputs for the prompt, each shown when it is complete.",
        least=1,
        most=128,
        advice="1 is usual",
    ),
]
_Stream = Annotated[bool, _GENERAL.option("--stream/--no-stream", "Print pieces as they come.")]
_RequestId = Annotated[
    str | None,
    _REQUEST.text(
        "--request-id NAME",
        "Name for `kvplane abort` and `kvplane requests`. Default: a random one.",
        advice="shorten it",
    ),
]


@with_request_options
def generate(
    prompt: _PromptText = None,
    *,
    chat: _Chat = False,
    system: opt.System = None,
    token_ids: _TokenIds = None,
    num_outputs: _NumOutputs = 1,
    stream: _Stream = True,
    usage: opt.Usage = False,
    as_json: opt.JsonFlag = False,
    options: GenerateOptions,
    request_id: _RequestId = None,
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
) -> None:
    """Continue a prompt; the help text is _HELP."""
    full_prompt = _prompt(prompt, token_ids, chat, system)
    limit = options.get("max_tokens") or max(DEFAULT_MAX_TOKENS, options.get("min_tokens") or 0)
    is_told_of_limit = "max_tokens" not in options and not as_json
    options["max_tokens"] = limit
    if num_outputs > 1:
        options["n"] = num_outputs
    if request_id is not None:
        options["request_id"] = request_id
    with generation_session(server, as_json=as_json, wait=wait) as (client, model):
        if not model.has_tokenizer and token_ids is None:
            raise CommandError(f"model {model.name} has no tokenizer: give the prompt as --token-ids 1,2,3")
        with client.stream(full_prompt, **options) as output:
            if num_outputs > 1:
                last = outputs_out(output, num_outputs, as_json=as_json, stream=stream, as_ids=not model.has_tokenizer)
            else:
                last = stream_out(output, as_json=as_json, stream=stream, as_ids=not model.has_tokenizer)
    if last is not None:
        _tell_end(last, usage=usage, as_json=as_json, default_limit=limit if is_told_of_limit else None)


def _tell_end(last: Chunk, *, usage: bool, as_json: bool, default_limit: int | None) -> None:
    """Tells on stderr what is to be said of an output that is over.

    Args:
        last: Its last chunk.
        usage: Whether token counts are asked for.
        as_json: Whether stderr is for JSON alone.
        default_limit: Tokens after which it ends although nobody asked for that; None where somebody did.

    Raises:
        typer.Exit: Somebody else ended the request.
    """
    if usage:
        print_usage(last)
    if last.finish_reason is FinishReason.ABORT:
        if not as_json:
            err_console().print(f"[bold red]error:[/bold red] {ABORTED}")
        raise typer.Exit(EXIT_ERROR)
    if default_limit is not None and last.finish_reason is FinishReason.LENGTH:
        assert last.usage is not None, "the last chunk carries usage"
        if last.usage.completion_tokens == default_limit:
            err_console().print(f"[dim]ended after {default_limit} tokens; -n N sets another limit[/dim]")


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
    beside = " and ".join(["--chat"] * chat + ["--system"] * (system is not None))
    text = ids_or_text(prompt, token_ids, name="PROMPT", beside=beside, example='kvplane generate "Hello"')
    if not isinstance(text, str) or (not chat and system is None):
        return text
    opening = [ChatMessage("system", system)] if system is not None else []
    return [*opening, ChatMessage("user", text)]


def print_usage(last: Chunk) -> None:
    """Prints what the last chunk tells of the whole, on stderr."""
    assert last.usage is not None, "the last chunk carries usage"
    assert last.finish_reason is not None, "the last chunk carries the finish reason"
    counts = last.usage
    err_console().print(
        f"[dim]{last.finish_reason} · {counts.prompt_tokens} prompt tokens ({counts.cached_tokens} cached) · "
        f"{counts.completion_tokens} completion tokens · {escaped(last.request_id)}[/dim]"
    )
