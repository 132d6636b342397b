"""Two ranks in two network namespaces: the same run as on one machine, also after the link between them was cut."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from namespaces import ADDRESSES, DEVICE, Machines, two_machines
from processes import run_ranks, start_ranks, wait_ranks
from test_ranks import recipe

from dwindle.core.errors import UserError
from dwindle.core.run_directory import RunDirectory
from dwindle.distributed.world import joined
from dwindle.run.pretrain import pretrain, resume
from dwindle.training.callbacks import Callback
from runs import assert_same_run
from tiny import tiny_directory

pytestmark = pytest.mark.slow
CUT_AFTER = 9
"""A step between two checkpoints."""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines() as found:
        yield found


@pytest.fixture(scope="module")
def place(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("link")
    tiny_directory(place / "model", tie_word_embeddings=True, num_hidden_layers=2)
    return place


@pytest.fixture(scope="module")
def on_one_machine(place: Path) -> Path:
    run_ranks(2, lambda rank: pretrain(recipe(place, "fsdp"), place / "one"), per_node=1)
    return place / "one"


def move(machines: Machines, rank: int) -> None:
    """Put this rank on the machine of its number."""
    machines.enter(rank)
    os.environ |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": DEVICE}


@contextmanager
def told() -> Iterator[None]:
    """Errors of users as the command shows them, in a process of a test."""
    try:
        yield
    except UserError as error:
        os.write(2, f"error: {error}\n".encode())
        raise SystemExit(2) from None


@pytest.mark.parity
def test_two_machines_compute_what_one_does(machines: Machines, place: Path, on_one_machine: Path) -> None:
    before = machines.received_bytes(1)

    def task(rank: int) -> None:
        move(machines, rank)
        pretrain(recipe(place, "fsdp"), place / "two")

    run_ranks(2, task, per_node=1)
    assert_same_run(place / "two", on_one_machine)
    weights = (place / "two" / "model" / "model.safetensors").stat().st_size
    assert machines.received_bytes(1) - before > 10 * weights  # gathered in every step, over the link


class Cut(Callback):
    """Takes the link down after a step."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    def after_step(self, trainer: Any) -> None:
        if trainer.step == CUT_AFTER and trainer.engine.is_main:
            self._machines.set_link("down")


def test_a_cut_link_ends_both_with_one_line_and_the_run_resumes(
    machines: Machines, place: Path, on_one_machine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, settings = place / "cut", recipe(place, "fsdp", timeout_s=15)

    def begin(rank: int) -> None:
        move(machines, rank)
        with told():
            pretrain(settings, run, callbacks=[Cut(machines)])

    try:
        statuses = wait_ranks(start_ranks(2, begin, per_node=1))
    finally:
        machines.set_link("up")
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [2, 2]
    lines = sorted(line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
    said = "the other processes did not answer for 15 s (training.timeout_s)"
    assert len(lines) == 2 and all(line.startswith(f"error: process {n}: {said}") for n, line in enumerate(lines))
    assert RunDirectory(run).list_checkpoints() and not RunDirectory(run).is_finished

    def go_on(rank: int) -> None:
        move(machines, rank)
        resume(run)

    run_ranks(2, go_on, per_node=1)
    assert_same_run(run, on_one_machine)


def test_the_store_behind_a_cut_link_is_given_up(
    machines: Machines, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A task of the main process may take any time, as long as its store answers."""
    given_up = tmp_path / "given-up"

    def long_task(rank: int) -> None:
        while rank == 0 and not given_up.exists():
            machines.set_link("down")
            time.sleep(0.1)

    def task(rank: int) -> None:
        move(machines, rank)
        try:
            with told(), joined("cpu", timeout_s=10) as world:
                world.main_first("task", lambda: long_task(rank))
        except SystemExit:
            given_up.touch()
            raise

    try:
        statuses = wait_ranks(start_ranks(2, task, per_node=1))
    finally:
        machines.set_link("up")
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [0, 2]
    assert "error: process 1: the other processes did not answer for 10 s" in capfd.readouterr().err
