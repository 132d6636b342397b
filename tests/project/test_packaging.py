"""The wheel and the source archive: complete, one version, and what is installed runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import dwindle

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, built from a copy: setuptools writes into the tree that it builds."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("build") / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, copy)
    shutil.copy(ROOT / "constraints.txt", copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    shutil.copytree(ROOT / "docs", copy / "docs", ignore=shutil.ignore_patterns("pictures", "results"))
    script = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    done = subprocess.run([sys.executable, "-c", script], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return copy / "dist"


@pytest.mark.slow
def test_archives_are_complete(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name.startswith(f"dwindle-{dwindle.__version__}-") and dwindle.__version__ in sdist.name
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        metadata = next(archive.read(name).decode() for name in inside if name.endswith(".dist-info/METADATA"))
    files = [p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "dwindle").rglob("*") if p.is_file()]
    wanted = {name for name in files if "__pycache__" not in name}
    assert wanted <= inside, sorted(wanted - inside)
    others = {name for name in inside - wanted if ".dist-info/" not in name}
    assert not others
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(f"Provides-Extra: {extra}" in metadata for extra in extras)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "pyproject.toml", "src/dwindle/py.typed"} <= names


@pytest.mark.slow
def test_what_is_installed_runs(built: Path, tmp_path: Path) -> None:
    """From the wheel as pip installs it: version, help, ready-made recipes, and completion of the shell."""
    pytest.importorskip("pip")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run([*pip, "--target", str(tmp_path / "site"), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    console = tmp_path / "site" / "bin" / "dwindle"
    base = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "100"}

    def run(*arguments: str, **extra: str) -> str:
        done = subprocess.run(
            [str(console), *arguments], cwd=tmp_path, env=base | extra, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version").strip() == dwindle.__version__
    assert "Prune a real model" in run("demo", "--help")
    assert run(_DWINDLE_COMPLETE="complete_bash", COMP_WORDS="dwindle ex", COMP_CWORD="1").split() == ["export"]
    shown = ["bash", "-c", f"'{console}' --show-completion; exit $?"]  # the shell is found among the parents
    done = subprocess.run(shown, cwd=tmp_path, env=base, capture_output=True, text=True)
    assert "_dwindle_completion" in done.stdout, done.stderr
    recipes = {path.stem for path in (tmp_path / "site" / "dwindle" / "recipe" / "ready").glob("*.toml")}
    assert recipes == {path.stem for path in (ROOT / "src" / "dwindle" / "recipe" / "ready").glob("*.toml")} and recipes


def test_the_papers_are_cited() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    for number, first in {"2502.06663": "Xing", "2502.03460": "Pan"}.items():
        (paper,) = [found for found in citation["references"] if found["url"].endswith(number)]
        assert paper["identifiers"] == [{"type": "other", "value": f"arXiv:{number}"}]
        assert paper["authors"][0]["family-names"] == first and paper["title"] and paper["year"] == 2025
        assert all({"family-names", "given-names"} == set(author) for author in paper["authors"])


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == dwindle.__version__  # type: ignore[index]
    assert f"## {dwindle.__version__}" in (ROOT / "CHANGELOG.md").read_text()
