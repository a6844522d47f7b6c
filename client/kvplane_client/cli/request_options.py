"""The options of a request, which `generate` and `chat` have in common.

Station: between `options`, which declares each, and the commands, which are given all of them as one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from kvplane_client.cli import options as opt
from kvplane_client.cli.signature import shows

__all__ = ["with_request_options"]

_OPTIONS: Final[dict[str, tuple[Any, Any]]] = {
    "temperature": (opt.Temperature, None),
    "top_k": (opt.TopK, None),
    "top_p": (opt.TopP, None),
    "min_p": (opt.MinP, None),
    "repetition_penalty": (opt.RepetitionPenalty, None),
    "presence_penalty": (opt.PresencePenalty, None),
    "frequency_penalty": (opt.FrequencyPenalty, None),
    "logit_bias": (opt.LogitBias, None),
    "seed": (opt.Seed, None),
    "logprobs": (opt.Logprobs, None),
    "max_tokens": (opt.MaxTokens, None),
    "min_tokens": (opt.MinTokens, None),
    "stop": (opt.Stop, None),
    "stop_token_ids": (opt.StopTokenId, None),
    "ignore_eos": (opt.IgnoreEos, False),
    "include_stop": (opt.IncludeStop, False),
    "priority": (opt.Priority, 0),
    "retention_priority": (opt.RetentionPriority, 0),
    "retention": (opt.RetentionParts, None),
    "cache_salt": (opt.CacheSalt, None),
    "tenant": (opt.Tenant, None),
    "adapter": (opt.Adapter, None),
    "deadline": (opt.Deadline, None),
}
"""By the names of ``GenerateOptions``, in the order of the help: what typer reads, and the default."""


def with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Has a command take them where its signature has ``options``, and hands them on as that: what was given of them.

    Raises:
        typer.BadParameter: As the command is called: see `options.chosen`.
    """

    @functools.wraps(command)
    def run(*args: Any, **given: Any) -> None:
        chosen = opt.chosen(**{name: given.pop(name) for name in _OPTIONS})
        command(*args, options=chosen, **given)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name != "options":
            parameters.append(parameter)
            continue
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for name, (annotation, default) in _OPTIONS.items()
        ]
    return shows(run, parameters)
