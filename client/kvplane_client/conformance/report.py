"""Results for programs: a JSON document, and JUnit's XML for CI.

Station: called by the command.

Source: JUnit's format as CI systems read it (the testsuite element of Ant's task, without properties).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from kvplane_client.conformance.runner import Outcome, Result
from kvplane_client.conformance.target import Target

__all__ = ["as_document", "as_junit", "failure_text"]

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def failure_text(result: Result) -> str:
    """Says what was expected, what came, and which sentence that breaks."""
    return f"expected {result.expected}\ngot {result.got}\nbreaks {result.contract}"


def as_document(target: Target, judge: str, results: Sequence[Result]) -> dict[str, Any]:
    """Returns all there is to say, as plain values."""
    counts = Counter(result.outcome for result in results)
    return {
        "executor": {
            "address": target.address,
            "executor_id": target.info.executor_id,
            "backend": target.info.backend,
            "model_name": target.info.model_name,
            "model_fingerprint": target.info.model_fingerprint,
            "device": target.info.device,
            "dtype": target.info.dtype,
            "block_size": target.info.block_size,
        },
        "judge": judge,
        "counts": {outcome.value: counts[outcome] for outcome in Outcome},
        "cases": [dataclasses.asdict(result) for result in results],
    }


def as_junit(target: Target, results: Sequence[Result]) -> bytes:
    """Returns the XML of one test suite, in UTF-8."""
    counts = Counter(result.outcome for result in results)
    suite = ElementTree.Element(
        "testsuite",
        name="kvplane conformance",
        hostname=_plain(target.address),
        tests=str(len(results)),
        failures=str(counts[Outcome.FAILED]),
        errors="0",
        skipped=str(counts[Outcome.SKIPPED]),
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    for result in results:
        topic, _, name = result.name.partition("/")
        case = ElementTree.SubElement(suite, "testcase", classname=topic, name=name, time=f"{result.seconds:.3f}")
        if result.outcome is Outcome.FAILED:
            text = _plain(failure_text(result))
            ElementTree.SubElement(case, "failure", message=text.partition("\n")[0]).text = text
        elif result.outcome is Outcome.SKIPPED:
            ElementTree.SubElement(case, "skipped", message=_plain(result.reason))
    ElementTree.indent(suite)
    document: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _plain(text: str) -> str:
    """Leaves out what XML cannot carry."""
    return _NOT_XML.sub("\ufffd", text)
