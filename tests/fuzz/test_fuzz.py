"""A few inputs for every target; ``make fuzz`` tries them for an hour, and what it finds is replayed here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from fuzz_campaign import known
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import TARGETS, Place, survives

FEW = ("checkpoint",)
"""Slow targets."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    before = Path.cwd()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Place(tmp_path_factory.mktemp("fuzz"))
    os.chdir(before)


@pytest.mark.parametrize("name", TARGETS)
def test_any_input_is_refused_or_works(place: Place, name: str) -> None:
    """Hypothesis draws, so that what fails is shown as small as possible."""

    @settings(
        max_examples=4 if name in FEW else 50,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def once(random: Random) -> None:
        survives(name, place, TARGETS[name][0](random, place))

    once()


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_stays_mended(place: Place, name: str) -> None:
    for input_ in known(name):
        survives(name, place, input_)
