"""``kvplane generate``: one prompt in, its continuation out."""

from __future__ import annotations

import sys
from typing import Annotated, Any, cast

import typer
from rich.markup import escape

from kvplane_client.cli import options as opt
from kvplane_client.cli.output import err_console, print_json, write_text
from kvplane_client.cli.session import EXIT_ERROR, generation_session
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

__all__ = ["generate", "given", "stream_out"]

_HELP = """Continue a prompt. Text streams to stdout as it is produced; Ctrl-C aborts the request on the server.

The prompt is the argument or, without one, standard input. A model without a tokenizer takes and gives token ids.

Examples:

  kvplane generate "The capital of France is" --temperature 0 -n 16

  kvplane generate --chat "Name three rivers." --system "Be brief."

  cat article.txt | kvplane generate -n 200 --stop "###"

  kvplane generate "Hello" --retention :512=80 --retention decode=-50/60   (keep the first 512 tokens' blocks longest,
  the answer's less than others for a minute)

  kvplane generate "Hello" --json | jq -r .text          (one JSON object a chunk)

  kvplane generate "Hello" --json --no-stream | jq .usage (one JSON object in all)
"""


def generate(
    prompt: Annotated[str | None, typer.Argument(help='Text to continue; "-" or nothing reads stdin.')] = None,
    *,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user message of a chat.")] = False,
    system: opt.System = None,
    token_ids: Annotated[str | None, typer.Option("--token-ids", help='Prompt as token ids, such as "1,2,3".')] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print pieces as they come.")] = True,
    usage: Annotated[bool, typer.Option("--usage", help="Print token counts and finish reason on stderr.")] = False,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", help="ID:VALUE, -100 to 100. May be repeated.", rich_help_panel="Sampling"),
    ] = None,
    seed: opt.Seed = None,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="Report log probabilities (with --json).", rich_help_panel="Sampling"),
    ] = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: Annotated[
        int | None, typer.Option("--min-tokens", help="Fewest tokens to produce.", rich_help_panel="Stopping")
    ] = None,
    stop: opt.Stop = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", help="Token id that ends it. May be repeated.", rich_help_panel="Stopping"),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.", rich_help_panel="Stopping")
    ] = False,
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="Keep the matched stop string.", rich_help_panel="Stopping")
    ] = False,
    priority: Annotated[int, typer.Option("--priority", help="Lower is served first (priority policy).")] = 0,
    retention_priority: Annotated[
        int, typer.Option("--retention-priority", help="Higher is cached longer (eviction policy priority).")
    ] = 0,
    retention: Annotated[
        list[str] | None,
        typer.Option(
            "--retention",
            help="Which blocks are cached longer: START:STOP=PRIORITY or decode=PRIORITY, /SECONDS after it for a"
            " while. May be repeated.",
        ),
    ] = None,
    cache_salt: Annotated[str | None, typer.Option("--cache-salt", help="Share cached blocks only with it.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose request it is (fair policy).")] = None,
    request_id: Annotated[str | None, typer.Option("--request-id", help="Name for abort and requests.")] = None,
    deadline: Annotated[float | None, typer.Option("--deadline", min=0, help="Seconds it may take in all.")] = None,
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """Continue a prompt; the help text is _HELP."""
    full_prompt = _prompt(prompt, token_ids, chat, system)
    options = given(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=opt.parse_logit_bias(logit_bias),
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
        retention=opt.parse_retention(retention),
        cache_salt=cache_salt,
        tenant=tenant,
        request_id=request_id,
        deadline=deadline,
    )
    with (
        generation_session(server, as_json=as_json, wait=wait) as (client, model),
        client.stream(full_prompt, **options) as output,
    ):
        last = stream_out(output, as_json=as_json, stream=stream, as_ids=not model.has_tokenizer)
    if usage and last is not None:
        _print_usage(last)
    if last is not None and last.finish_reason is FinishReason.ABORT:
        if not as_json:
            err_console().print("[bold red]aborted:[/bold red] somebody ended the request; its output is not complete")
        raise typer.Exit(EXIT_ERROR)


generate.__doc__ = _HELP


def given(**values: Any) -> GenerateOptions:
    """Returns the options that were given; flags that are off count as not given."""
    # The callers' names are those of the options; the request builder refuses any other.
    chosen = {name: value for name, value in values.items() if value is not None and value is not False}
    return cast(GenerateOptions, chosen)


def stream_out(output: SyncGenerationStream, *, as_json: bool, stream: bool, as_ids: bool = False) -> Chunk | None:
    """Prints an output as it comes, or at its end, and returns its last chunk.

    Args:
        output: The output.
        as_json: Print JSON.
        stream: Print pieces as they come.
        as_ids: Print token ids in place of text, of which a model without a tokenizer has none.
    """
    builder, last, ends_line = CompletionBuilder(), None, True
    for chunk in output:
        builder.add(chunk)
        last = chunk
        if not stream:
            continue
        if as_json:
            print_json(chunk)
        elif text := _shown(chunk, as_ids):
            write_text(text)
            ends_line = text.endswith("\n")
    if not stream:
        completion = builder.build()
        if as_json:
            print_json(completion)
        else:
            text = _shown(completion, as_ids)
            write_text(text)
            ends_line = text.endswith("\n")
    if not as_json and not ends_line:
        write_text("\n")
    return last


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


def _print_usage(last: Chunk) -> None:
    assert last.usage is not None, "the last chunk carries usage"
    assert last.finish_reason is not None, "the last chunk carries the finish reason"
    counts = last.usage
    err_console().print(
        f"[dim]{last.finish_reason} · {counts.prompt_tokens} prompt tokens ({counts.cached_tokens} cached) · "
        f"{counts.completion_tokens} completion tokens · {escape(last.request_id)}[/dim]"
    )
