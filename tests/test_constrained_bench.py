"""`benchmarks/constrained.py`: what grammars cost."""

import json
from pathlib import Path

import pytest

pytest.importorskip("llguidance")


def test_replies_in_json_are_measured_beside_free_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import constrained

    file = tmp_path / "found.json"
    flags = "--model tiny --device cpu --rows 2 --max-tokens 12 --repeats 2 --num-pages 64 --output"
    constrained.main([*flags.split(), str(file)])
    found = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == {key: found[key] for key in ("tok_s", *constrained.TIMES, "json_share", "free_beside")}
    assert set(found["each"]) == {*constrained.WORKLOADS, *constrained.TIMES} and all(len(rates) == 2 for rates in found["each"].values())
    assert found["json_share"] == round(found["tok_s"]["json"] / found["tok_s"]["free"], 3)
    assert found["mask_us_median"] <= found["fill_us"]
