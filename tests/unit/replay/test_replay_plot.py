"""Pictures of a replay: files of the format that their name asks for, with every line in them."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from kvmanager_service.replay.command import main
from kvmanager_service.replay.plot import PlotLibraryError, draw, require_library
from kvmanager_service.replay.report import Sample

SVG = "{http://www.w3.org/2000/svg}"
BLUE, RED = (0x1F, 0x6F, 0xEB), (0xD1, 0x24, 0x2F)


def samples(count: int) -> list[Sample]:
    """Nothing is hit, one waits, as many run as have come, half of the pool of 40 is in use."""
    return [
        Sample(float(index), hit_tokens=0, prompt_tokens=8, waiting=1, running=index, blocks_in_use=20)
        for index in range(count)
    ]


def points_of(path: Path) -> dict[str, list[tuple[float, float]]]:
    """The corners of each line of an SVG file, in its own units; y grows downwards."""
    groups = {group.attrib.get("id", ""): group for group in ET.parse(path).getroot().iter(f"{SVG}g")}
    lines = {}
    for name in ("hits", "waiting", "running", "in use"):
        if name in groups:
            numbers = [float(number) for number in re.findall(r"[\d.]+", groups[name][0].attrib["d"])]
            lines[name] = list(zip(numbers[::2], numbers[1::2], strict=True))
    return lines


def test_svg_has_every_line_from_the_first_sample_to_the_last(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    draw(samples(50), path, title="a < b & $c$", num_usable_blocks=40, has_clock=True)
    lines = points_of(path)
    assert list(lines) == ["hits", "waiting", "running", "in use"]
    left, right = lines["running"][0], lines["running"][-1]
    assert right[0] - left[0] > 400, "over the whole panel"
    assert left[1] - right[1] > 60, "it grows"
    assert {(line[0][0], line[-1][0]) for line in lines.values()} == {(left[0], right[0])}
    for name in ("hits", "waiting", "in use"):
        assert len({y for _, y in lines[name]}) == 1, "what is constant is level"
    texts = {text.text for text in ET.parse(path).getroot().iter(f"{SVG}text")}
    assert {"a < b & $c$", "requests", "share of the pool in use", "seconds"} <= texts


def test_svg_of_the_same_samples_is_the_same_file(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        draw(samples(9), tmp_path / name, title="t", num_usable_blocks=40, has_clock=True)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_svg_without_a_clock_has_no_requests_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    draw(samples(9), path, title="t", num_usable_blocks=40, has_clock=False)
    assert list(points_of(path)) == ["hits", "in use"]
    texts = [text.text for text in ET.parse(path).getroot().iter(f"{SVG}text")]
    assert "requests" in texts
    assert "seconds" not in texts


@pytest.mark.parametrize("name", ["plot.png", "PLOT.PNG"])
@pytest.mark.parametrize(("has_clock", "height"), [(True, 1035), (False, 720)])
def test_png_has_its_size_and_every_line(tmp_path: Path, name: str, has_clock: bool, height: int) -> None:
    path = tmp_path / name
    draw(samples(50), path, title="t", num_usable_blocks=40, has_clock=has_clock)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with Image.open(path) as image:
        assert image.size == (1350, height)
        pixels = image.convert("RGB")
    columns: dict[tuple[int, ...], set[int]] = {BLUE: set(), RED: set()}
    for x in range(pixels.width):
        for y in range(pixels.height):
            pixel = pixels.getpixel((x, y))
            if pixel in columns:
                columns[pixel].add(x)  # type: ignore[index]
    assert len(columns[BLUE]) > 800, "lines over the width"
    assert (len(columns[RED]) > 100) is has_clock, "the second line of a panel is that of who runs"


def test_one_sample_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    draw(samples(1), path, title="t", num_usable_blocks=40, has_clock=True)
    with Image.open(path) as image:
        image.verify()


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without matplotlib."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.usefixtures("no_library")
def test_plot_without_its_library_is_refused_before_the_trace_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlotLibraryError, match=r"expected matplotlib, got none .* pip install 'kvplane\[plot\]'"):
        require_library()
    plot = tmp_path / "plot.svg"
    arguments = [str(tmp_path / "absent.jsonl"), "--num-blocks", "9", "--plot", str(plot), "--json"]
    assert main(arguments) == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["reason"] == "NO_PLOT_LIBRARY"
    assert "kvplane[plot]" in error["message"]
    assert not plot.exists()


@pytest.mark.usefixtures("no_library")
def test_replay_without_a_plot_needs_no_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [1]}\n')
    assert main([str(trace), "--num-blocks", "9", "--block-size", "512", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"]["replayed"] == 1
