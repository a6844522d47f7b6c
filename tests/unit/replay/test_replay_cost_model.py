"""The cost model's file, and which of file, flag and default is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmanager_service.replay.cost_model import TERMS, CostModel, CostModelError, read_cost_model

KNOWN = dict(zip(TERMS, (4000, 30.5, 9, 0.03, 0.002), strict=True))


def written(folder: Path, document: object) -> Path:
    path = folder / "cost.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_read_cost_model_takes_the_terms_and_ignores_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path, {"cost_model": KNOWN, "fit": {"mean_error": 0.1}})
    assert read_cost_model(path) == CostModel(4000, 30.5, 9, 0.03, 0.002)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("{", "a JSON object"),
        ([], 'an object "cost_model"'),
        ({"cost_model": 3}, 'an object "cost_model"'),
        ({"cost_model": {"step_us": 1}}, "cost_model with step_us, prefill_token_us"),
        ({"cost_model": KNOWN | {"row_us": 1}}, "cost_model with step_us, prefill_token_us"),
        ("[" * 200_000, "a JSON object"),
        ({"cost_model": KNOWN | {"step_us": 1e300}}, "step_us: a number in 0 to 1e+12"),
        ({"cost_model": KNOWN | {"step_us": -1}}, "step_us: a number in 0 to 1e+12"),
        ({"cost_model": KNOWN | {"step_us": True}}, "step_us: a number in 0 to 1e+12"),
        ({"cost_model": KNOWN | {"decode_row_us": "9"}}, "decode_row_us: a number in 0 to 1e+12"),
        ('{"cost_model": ' + json.dumps(KNOWN).replace("4000", "NaN") + "}", "step_us: a number in 0 to 1e+12"),
    ],
)
def test_read_cost_model_of_another_file_says_what_is_expected(tmp_path: Path, document: object, expected: str) -> None:
    with pytest.raises(CostModelError, match="kvplane calibrate") as caught:
        read_cost_model(written(tmp_path, document))
    assert expected in caught.value.expected
