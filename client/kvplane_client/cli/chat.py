"""``kvplane chat``: a conversation in the terminal, or one answer to what comes on standard input."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from rich.console import Console

from kvplane_client.cli import options as opt
from kvplane_client.cli.generate import ABORTED, print_usage
from kvplane_client.cli.output import err_console, escaped, print_json, write_text
from kvplane_client.cli.request_options import with_request_options
from kvplane_client.cli.session import CommandError, generation_session
from kvplane_client.client import Client
from kvplane_client.errors import KvPlaneError
from kvplane_client.types import ChatMessage, Chunk, FinishReason, GenerateOptions

__all__ = ["chat"]

_HELP = """Talk with the model. It needs a chat template.

In the terminal: /exit or Ctrl-D leaves, /reset starts over, Ctrl-C stops an
answer (at the prompt it leaves). With standard input redirected, the whole
input is one message and the answer is printed.

An answer ends where the model ends it, at the latest at the model's length:
-n limits it.

Examples:

  kvplane chat --system "You are a pirate." --temperature 0.7

  echo "What is a KV cache?" | kvplane chat -n 100
"""
_COMMANDS = "/exit leaves, /reset starts over, /help shows this; Ctrl-C stops an answer, Ctrl-D leaves"


@dataclass
class _Conversation:
    """What was said, and how to go on.

    Attributes:
        client: The connection.
        options: Sampling and stopping.
        as_json: Print chunks as JSON lines.
        usage: Print token counts after each answer.
        system: The system message, or None.
        messages: The turns so far.
    """

    client: Client
    options: GenerateOptions
    as_json: bool
    usage: bool
    system: str | None
    messages: list[ChatMessage] = field(default_factory=list)

    def reset(self) -> None:
        """Forgets the turns."""
        self.messages = [ChatMessage("system", self.system)] if self.system is not None else []

    def answer(self, text: str) -> None:
        """Sends a message and prints the answer; both become part of the conversation once the answer ended.

        An interrupted answer stays in the conversation as far as it got.

        Raises:
            CommandError: Somebody ended the request.
        """
        question = ChatMessage("user", text)
        pieces: list[str] = []
        last: Chunk | None = None
        try:
            with self.client.stream([*self.messages, question], **self.options) as output:
                for last in output:
                    pieces.append(last.text)
                    if self.as_json:
                        print_json(last)
                    else:
                        write_text(last.text)
        finally:
            if not self.as_json:
                write_text("\n")
            if pieces:
                self.messages += [question, ChatMessage("assistant", "".join(pieces))]
        if last is not None:
            if self.usage:
                print_usage(last)
            if last.finish_reason is FinishReason.ABORT:
                raise CommandError(ABORTED)


@with_request_options
def chat(
    *,
    system: opt.System = None,
    usage: opt.Usage = False,
    as_json: opt.JsonFlag = False,
    options: GenerateOptions,
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
) -> None:
    """Talk with the model; the help text is _HELP."""
    with generation_session(server, as_json=as_json, wait=wait) as (client, model):
        if not model.has_chat_template:
            instead = "`kvplane generate`" if model.has_tokenizer else "`kvplane generate --token-ids 1,2,3`"
            raise CommandError(f"model {model.name} has no chat template: use {instead}")
        conversation = _Conversation(client, options, as_json, usage, system)
        conversation.reset()
        if sys.stdin.isatty():
            err_console().print(f"[dim]{escaped(model.name)} on {escaped(server)}. {_COMMANDS}[/dim]")
            _loop(conversation, err_console())
        else:
            _answer_stdin(conversation)


chat.__doc__ = _HELP


def _answer_stdin(conversation: _Conversation) -> None:
    text = sys.stdin.read().strip()
    if not text:
        raise CommandError("expected a message on standard input, got nothing")
    conversation.answer(text)


def _loop(conversation: _Conversation, console: Console) -> None:
    """Reads and answers until the user leaves."""
    while True:
        try:
            line = input(">>> ").strip()
        except EOFError:
            write_text("\n")
            return
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                conversation.reset()
            case "/help":
                console.print(f"[dim]{_COMMANDS}[/dim]")
            case _ if line.startswith("/"):
                console.print(f"[dim]unknown command {escaped(line.split()[0])}: {_COMMANDS}[/dim]")
            case _:
                _turn(conversation, line, console)


def _turn(conversation: _Conversation, line: str, console: Console) -> None:
    """Answers one line; an error or an interrupt ends the answer, not the conversation."""
    try:
        conversation.answer(line)
    except KvPlaneError as error:
        console.print(f"[bold red]error:[/bold red] {escaped(error.message, as_lines=True)}")
    except CommandError as error:
        console.print(f"[bold red]error:[/bold red] {escaped(str(error), as_lines=True)}")
    except KeyboardInterrupt:
        console.print("[dim]stopped[/dim]")
