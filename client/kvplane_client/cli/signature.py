"""What typer takes for the signature of a command that is wrapped.

Station: below `connection` and `request_options`, which give commands more options than they are written with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

__all__ = ["shows"]


def shows(run: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Has typer read these parameters, with annotations that are no strings, in the place of a wrapper's own."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
