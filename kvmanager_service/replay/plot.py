"""A replay's course as an SVG file: hit ratio, requests and pool, over time.

Station: called by `__main__`. Written by hand, since three polylines need no plotting library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from kvmanager_service.replay.report import Sample

__all__ = ["draw"]

_WIDTH, _PANEL, _GAP, _LEFT, _TOP = 900, 170, 50, 70, 50
_PLOT_WIDTH = _WIDTH - _LEFT - 30
_MOST_POINTS = 900
_COLOURS = ("#1f6feb", "#d1242f")


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    lines: tuple[tuple[str, list[float]], ...]
    top: float
    """The value at the upper edge."""


def draw(samples: Sequence[Sample], *, title: str, num_usable_blocks: int, has_clock: bool) -> str:
    """Draw samples as an SVG document.

    Args:
        samples: in order of time; at least one.
        title: what was replayed.
        num_usable_blocks: blocks of the pool.
        has_clock: whether times are seconds; else they count requests.
    """
    stride = -(-len(samples) // _MOST_POINTS)
    shown = list(samples[::-1][::stride])[::-1]  # the last is always among them
    ratio = [sample.hit_tokens / max(1, sample.prompt_tokens) for sample in shown]
    waiting, running = [float(sample.waiting) for sample in shown], [float(sample.running) for sample in shown]
    in_use = [sample.blocks_in_use / num_usable_blocks for sample in shown]
    panels = [_Panel("prefix hit ratio so far, tokens", (("hits", ratio),), 1.0)]
    if has_clock:
        lines = (("waiting", waiting), ("running", running))
        panels.append(_Panel("requests", lines, max(1.0, *waiting, *running)))
    panels.append(_Panel("share of the pool in use", (("in use", in_use),), 1.0))
    last = shown[-1].time or 1.0
    xs = [_LEFT + _PLOT_WIDTH * sample.time / last for sample in shown]
    height = _TOP + len(panels) * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, _TOP + index * (_PANEL + _GAP), xs)
    unit = "seconds" if has_clock else "requests"
    parts.append(f'<text x="{_LEFT + _PLOT_WIDTH}" y="{height - 14}" text-anchor="end">{last:,.0f} {unit}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: _Panel, y: float, xs: Sequence[float]) -> list[str]:
    bottom = y + _PANEL
    parts = [
        f'<rect x="{_LEFT}" y="{y}" width="{_PLOT_WIDTH}" height="{_PANEL}" fill="none" stroke="#999"/>',
        f'<text x="{_LEFT}" y="{y - 6}">{escape(panel.title)}</text>',
        f'<text x="{_LEFT - 6}" y="{y + 10}" text-anchor="end">{panel.top:g}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
    ]
    for index, (name, values) in enumerate(panel.lines):
        colour = _COLOURS[index]
        points = " ".join(
            f"{x:.1f},{bottom - _PANEL * value / panel.top:.1f}" for x, value in zip(xs, values, strict=True)
        )
        label_x = _LEFT + _PLOT_WIDTH - 70 * index
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<text x="{label_x}" y="{y - 6}" text-anchor="end" fill="{colour}">{escape(name)}</text>',
        ]
    return parts
