"""Whether a run reached its target, from what lies on disk."""

from __future__ import annotations

from typing import Any

from dwindle.report.target import target_missed

SOURCE = {"parameters": 1000, "layer_parameters": [300, 300]}


def recipe(target: str, **prune: Any) -> dict[str, Any]:
    return {"prune": {"enabled": True, "target": target, **prune}}


def test_the_ledger_says_where_the_run_should_end() -> None:
    source = SOURCE | {"options": {"pacing": {"end_count": 480}}}
    assert target_missed(recipe("50%"), source, 490, {}) and not target_missed(recipe("50%"), source, 480, {})


def test_a_shape_is_compared_size_by_size() -> None:
    layer = {"query_heads": [0, 1], "ffn": [0, 1, 2]}
    structure = {"hidden": [0, 1, 2, 3], "layers": [layer, layer]}
    source = SOURCE | {"options": {"pacing": {"end_count": 1}}}  # an estimate only
    assert not target_missed(recipe("hidden=4,ffn=3"), source, 900, structure)
    assert target_missed(recipe("heads=1"), source, 900, structure)
    assert not target_missed(recipe("heads=1"), source, 900, {})


def test_what_cannot_be_told_is_not_claimed() -> None:
    assert not target_missed({}, {}, None, {})
    assert not target_missed(recipe("no size"), SOURCE, 900, {})
    assert not target_missed(recipe("50%", enabled=False), SOURCE, 900, {})
    assert not target_missed({"prune": "x"}, {"options": {"pacing": {"end_count": "x"}}}, 900, {})
