"""The environment stays what the constraint file says: the pinned CPU torch and nothing that drags CUDA in."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def installed() -> set[str]:
    return {str(d.metadata["Name"]).lower() for d in distributions()}


def test_torch_is_the_pinned_cpu_build() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU host brings its own torch")
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert torch.__version__.split("+")[0] == pinned[1]
    assert torch.version.cuda is None, "a CUDA build of torch was installed"


def test_no_cuda_packages_and_no_torchvision() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU host brings its own packages")
    unwanted = sorted(name for name in installed() if name.startswith("nvidia-") or name in {"torchvision", "triton"})
    assert unwanted == []


def test_every_install_command_uses_the_constraint_file() -> None:
    texts = [ROOT / "Makefile", ROOT / "README.md", *(ROOT / ".ci").iterdir(), *(ROOT / "docs").glob("*.md")]
    for path in texts:
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.search(r"\bpip install\b|\$\(PIP\) install", line) and "--no-deps" not in line:
                assert "-c constraints.txt" in line or "--upgrade pip" in line, f"{path.name}: {line.strip()}"


def test_results_name_files_not_folders_of_a_machine() -> None:
    """What a study wrote is committed as it is, so it must not say where a machine kept its files."""
    for path in (ROOT / "docs" / "results").iterdir():
        found = re.findall(r'"(?:/|~/|\.\./)[^"]*"', path.read_text(encoding="utf-8"))
        assert found == [], path.name
