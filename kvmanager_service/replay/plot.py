"""A replay's course as a picture: hit ratio, requests and pool, over time.

Station: called by `command`. It is matplotlib's work, which only the extra `plot` installs: it is imported here alone,
and where a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvmanager_service.replay.report import Sample

__all__ = ["SUFFIXES", "PlotLibraryError", "draw", "require_library"]

SUFFIXES: Final = (".svg", ".png")
"""What a file's name may end with; it decides the format."""

_WIDTH, _PANEL, _TITLE = 9.0, 2.1, 0.6
"""Inches."""
_PNG_DPI: Final = 150
_COLOURS: Final = ("#1f6feb", "#d1242f")


class PlotLibraryError(Exception):
    """A picture was asked for, and matplotlib is not installed."""


def require_library() -> None:
    """Raise PlotLibraryError unless pictures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise PlotLibraryError(
            f"--plot: expected matplotlib, got none ({error}); pip install 'kvplane[plot]', or leave --plot out"
        ) from error


def draw(samples: Sequence[Sample], path: Path, *, title: str, num_usable_blocks: int, has_clock: bool) -> None:
    """Draw samples into a file.

    Args:
        samples: in order of time; at least one.
        path: where to; its suffix is one of `SUFFIXES`.
        title: what was replayed.
        num_usable_blocks: blocks of the pool.
        has_clock: whether times are seconds; else they count requests.

    Raises:
        PlotLibraryError: matplotlib is not installed.
        OSError: the file can not be written.
    """
    require_library()
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Title of each panel, its lines by their names.
    panels = [
        ("prefix hit ratio so far, tokens", {"hits": [one.hit_tokens / max(1, one.prompt_tokens) for one in samples]})
    ]
    if has_clock:
        lines = {"waiting": [float(one.waiting) for one in samples], "running": [float(one.running) for one in samples]}
        panels.append(("requests", lines))
    panels.append(("share of the pool in use", {"in use": [one.blocks_in_use / num_usable_blocks for one in samples]}))
    times = [one.time for one in samples]
    # Text stays text in an SVG file, and the same samples give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvplane", "font.size": 9.0}):
        figure = Figure(figsize=(_WIDTH, _TITLE + _PANEL * len(panels)), layout="constrained")
        figure.suptitle(title, parse_math=False)
        for axes, (name, of_panel) in zip(figure.subplots(len(panels), sharex=True), panels, strict=True):
            axes.set_title(name, loc="left", fontsize="medium")
            for (label, values), colour in zip(of_panel.items(), _COLOURS, strict=False):
                axes.plot(times, values, color=colour, label=label, gid=label)
            axes.set_ylim(0.0, max(1.0, *(max(values) for values in of_panel.values())) * 1.02)
            axes.margins(x=0.0)
            axes.legend(
                loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(of_panel), frameon=False, borderaxespad=0
            )
        axes.set_xlabel("seconds" if has_clock else "requests")
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=_PNG_DPI, metadata=metadata)
