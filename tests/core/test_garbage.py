"""Garbage collection is paused and comes back."""

from __future__ import annotations

import gc

import pytest

from dwindle.core.garbage import no_garbage_collection


def test_paused_and_restored_after_an_error() -> None:
    assert gc.isenabled()

    @no_garbage_collection()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            fail()
        assert gc.isenabled()


def test_stays_off_where_it_was_off() -> None:
    with no_garbage_collection():
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
