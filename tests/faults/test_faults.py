"""A little of ``make faults``: the same table, with a few faults of each kind."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from fault_campaign import SHORT, Campaign, full_from, power_cut_at
from layer import CUT, FaultyDisk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to follow files"),
]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("faults").resolve(), SHORT)


@pytest.mark.parametrize("kind", ["global", "two ranks"])
def test_kills(campaign: Campaign, kind: str) -> None:
    row = campaign.kills(kind, 1, Random(1))
    assert row.faults == 1 and not row.unequal


@pytest.mark.parametrize("fault", ["full disk", "power cut"])
def test_disks(campaign: Campaign, fault: str) -> None:
    row = campaign.disk(fault, "plain", {"full disk": full_from, "power cut": power_cut_at}[fault], points=3)
    assert row.faults >= 3 and not row.unequal


def test_clock_and_slow_disk(campaign: Campaign) -> None:
    assert not campaign.clock("adapt", Random(1)).unequal
    assert not campaign.slow_disk("adapt").unequal


def test_the_layer_forgets_what_was_not_synced(tmp_path: Path) -> None:
    """The simulation itself: a file without fsync is empty, a name without an fsync of its directory is gone."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not (child := os.fork()):
        disk = FaultyDisk(folder, lambda disk, number: None)
        disk.install()
        for name in ("kept", "empty"):
            with (folder / name).open("w") as file:
                file.write("text")
                file.flush()
                if name == "kept":
                    os.fsync(file.fileno())
        os.fsync(os.open(folder, os.O_RDONLY))
        (folder / "gone").write_text("text")
        disk.cut_power()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == CUT
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"kept": "text", "empty": ""}
