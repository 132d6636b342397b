"""``dwindle check-family``: every built-in family passes; a wrong table does not."""

from __future__ import annotations

import pytest

from dwindle.anatomy import families
from dwindle.run import family_check
from tiny import FAMILIES, tiny_model


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_registered", {})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_built_in_family_passes(family: str) -> None:
    found = family_check.check_config(tiny_model(family).config, family)
    assert found.passed, [check for check in found.checks if not check.passed]
    compared = {check.compared for check in found.checks}
    assert "stock transformers, float32" in compared and len(compared) == 4
    assert all(check.difference > 0 for check in found.checks if check.allowed == family_check.STOCK)
