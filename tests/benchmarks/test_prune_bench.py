"""The benchmark of pruning: a source is written, every row is pruned, and parts and peaks are those of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.prune import main
from dwindle.core.errors import UserError


def test_rows(tmp_path: Path) -> None:
    small = ["--shape", "tiny", "--to", "60%", "--device", "cpu", "--sequences", "8", "--seq-len", "16"]
    shown: list[str] = []
    main(
        [*small, "--rows", "coupled,adapt,flap", "--place", str(tmp_path), "--out", str(tmp_path / "rows")],
        shown.append,
    )
    rows = [json.loads(line) for line in shown]
    assert [row["name"] for row in rows] == ["coupled", "adapt", "flap"]
    assert (tmp_path / "rows").read_text().splitlines() == shown and [*tmp_path.iterdir()] == [tmp_path / "rows"]
    whole = 512 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64) + 64  # the head is tied
    for row in rows:
        assert row["source_gb"] == pytest.approx(2 * whole / 1e9) and row["parameters"] <= 0.6 * whole
        parts = [row[f"{part}_s"] for part in ("measure", "calibrate", "select", "cut", "save")]
        assert all(seconds > 0 for seconds in parts) and sum(parts) <= row["after_load_s"]
        assert row["host_gb"] >= row["start_host_gb"] > 0
        assert row["host_x_file"] == pytest.approx(row["host_gb"] / row["source_gb"])
        assert row["options"]["sequences"] == 8


def test_unknown_row() -> None:
    with pytest.raises(UserError, match="--rows nosuch: choose among coupled"):
        main(["--rows", "coupled,nosuch"])
