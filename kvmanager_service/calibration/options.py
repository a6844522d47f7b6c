"""The command line of a calibration.

Station: read by `command`. Names and defaults are those of the manager's flags where it has the same thing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from kvmanager_service.core.scheduler_config import SchedulerConfig

__all__ = ["parse"]

_DESCRIPTION = """\
Measure what a step costs on an executor, and fit the cost model of
`kvplane replay` to it: steps of a few dozen shapes, prompts and decoding
rows, short and long. The executor must be up and serve no manager; it is
left without a cache."""

_EPILOG = """\
Examples:
  python -m executor_service --model ./model.gguf --port 50061 &
  kvplane calibrate localhost:50061 -o cost.json
  kvplane replay mooncake.jsonl --num-blocks 8000 --cost-model cost.json
  kvplane replay mooncake.jsonl --kv-cache cost.json --cost-model cost.json

Exit codes: 0 done, 1 the executor or the file can not be used, 2 wrong
usage, 3 no executor there, 130 interrupted."""


def _address(text: str) -> str:
    if re.fullmatch(r".+:\d+", text) is None:
        raise argparse.ArgumentTypeError(f"expected host:port, got {text!r}")
    return text


def _count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
        return int(text)

    return read


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments after the program's name. Raises SystemExit(2) for wrong ones, SystemExit(0) for --help."""
    parser = argparse.ArgumentParser(
        prog="kvplane calibrate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    limits = SchedulerConfig()
    parser.add_argument("address", type=_address, metavar="HOST:PORT", help="the executor's")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the cost model and the KV cache, for replay"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document; errors, too, on stderr")
    parser.add_argument(
        "--force", action="store_true",
        help="take an executor that has a KV cache; the cache is lost, and a manager that is alive takes it back",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=_count(1), default=3, help="times each step is timed, after once; default: %(default)s"
    )
    parser.add_argument(
        "--max-num-seqs", type=_count(1), default=limits.max_num_seqs, help="most rows of a step; default: %(default)s"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=_count(2), default=limits.max_num_batched_tokens,
        help="most tokens of a step; default: %(default)s",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.max_num_seqs > options.max_num_batched_tokens:
        parser.error(
            f"--max-num-seqs: expected at most --max-num-batched-tokens ({options.max_num_batched_tokens}), since each"
            f" row computes at least one token; got {options.max_num_seqs}"
        )
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"--output: expected a file in a folder that exists, got {options.output}")
    return options
