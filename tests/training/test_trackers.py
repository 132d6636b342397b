"""Tools that show a run's numbers: the calls (with stand-ins), the real packages where they are installed, failures."""

from __future__ import annotations

import math
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import make_trainer, tiny_llama

from dwindle.core.errors import UserError
from dwindle.core.run_directory import TOOLS
from dwindle.run.pretrain import pretrain
from dwindle.training import trackers
from dwindle.training.callbacks import Callback
from dwindle.training.config import LoggingConfig
from dwindle.training.loop import Trainer
from dwindle.training.trackers import TRACKERS, TrackerWarning, chosen_tools
from runs import tiny_recipe
from tiny import tiny_directory

SETTINGS = {"training": {"lr": 1e-2}, "prune": {"target": "60%"}}


class Extra(Callback):
    def after_step(self, trainer: Trainer) -> None:
        trainer.extra_metrics |= {"parameters": 100 - trainer.step, "bad": math.nan, "compacted": {"ffn": 3}}


def train(name: str, folder: Path, *, steps: int = 3, resumed: bool = False, **settings: Any) -> Trainer:
    tracker = TRACKERS[name](folder, LoggingConfig(**settings), "mine", SETTINGS)
    trainer = make_trainer(tiny_llama(), [Extra(), tracker], num_steps=steps)
    if resumed:
        trainer.step = steps - 1
    trainer.run()
    return trainer


def test_every_tool_has_its_folder_and_the_default_is_tensorboard() -> None:
    assert tuple(TRACKERS) == TOOLS
    wanted = ["tensorboard"] if find_spec("tensorboard") else []
    assert chosen_tools(LoggingConfig()) == wanted and chosen_tools(LoggingConfig(to=[])) == []
    assert chosen_tools(LoggingConfig(to=["wandb", "trackio", "wandb"])) == ["wandb", "trackio"]
    with pytest.raises(UserError, match="wanb"):
        LoggingConfig(to=["wanb"])


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    for name, tool in TRACKERS.items():
        with pytest.raises(UserError, match=f"^logging.to: {name} is not installed: run `pip install {name}`$"):
            tool(tmp_path, LoggingConfig(), "mine", {})
    assert not list(tmp_path.iterdir())
    tiny_directory(tmp_path / "model")
    recipe = tiny_recipe(tmp_path, steps=2, prune={"target": "80%"}, logging={"to": ["wandb"]})
    with pytest.raises(UserError, match="wandb is not installed"):
        pretrain(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tool_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **_: None, log=refuse, finish=refuse))
    with pytest.warns(
        TrackerWarning, match=r"^logging.to: trackio failed \(no route\): the run goes on without it$"
    ) as w:
        assert train("trackio", tmp_path).status == "finished"
    assert len(w) == 1


@pytest.mark.parametrize("online", [False, True])
def test_calls_of_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, online: bool) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda n, step: calls.append((step, n)), finish=lambda: calls.append("finish"))
    fake = SimpleNamespace(init=lambda **how: calls.append(how) or run, Settings=lambda **how: how)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    train("wandb", tmp_path, online=online, project="p")
    train("wandb", tmp_path, online=online, project="p", resumed=True)
    first, again = calls[0], calls[5]
    assert first["mode"] == ("online" if online else "offline") and first["project"] == "p"
    assert first["config"] == SETTINGS and first["dir"] == str(tmp_path) and first["id"] == again["id"]
    steps = [call for call in calls if isinstance(call, tuple)]
    assert [step for step, _ in steps] == [1, 2, 3, 3] and calls[4] == calls[-1] == "finish"
    assert steps[0][1]["parameters"] == 99 and not {"bad", "compacted"} & steps[0][1].keys()


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("name", ["trackio", "wandb", "mlflow"])
def test_nothing_calls_home_unless_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, online: bool
) -> None:
    switches = {"wandb": ("WANDB_ERROR_REPORTING", "false"), "mlflow": ("MLFLOW_DISABLE_TELEMETRY", "true")}
    places = {"TRACKIO_SPACE_ID": "me/space", "TRACKIO_SERVER_URL": "http://127.0.0.1:9"}
    for key, value in places.items():
        monkeypatch.setenv(key, value)
    for key, _ in switches.values():
        monkeypatch.setenv(key, "")  # so that it is as before afterwards
        monkeypatch.delenv(key)
    seen: dict[str, str] = {}
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(TRACKERS[name], "open", lambda self, step: seen.update(os.environ))
    train(name, tmp_path, online=online)
    if name in switches:
        key, value = switches[name]
        assert seen.get(key) == (None if online else value)
    else:
        assert places.keys() & seen.keys() == (places.keys() if online else set())
    assert places.items() <= os.environ.items()


def test_the_switches_are_those_of_the_packages() -> None:
    mlflow = pytest.importorskip("mlflow.environment_variables")
    env = pytest.importorskip("wandb.env")
    assert mlflow.MLFLOW_DISABLE_TELEMETRY.name in trackers.MLflow.quiet
    assert env.ERROR_REPORTING in trackers.WeightsAndBiases.quiet


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train("tensorboard", tmp_path)
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    train("mlflow", tmp_path)
    train("mlflow", tmp_path, steps=5, resumed=True)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("dwindle").experiment_id])
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in losses] == [1, 2, 3, 5] and run.data.params["training.lr"] == "0.01"


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    train("wandb", tmp_path)
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert list(folder.glob("*.wandb"))


def test_trackio(tmp_path: Path) -> None:
    """In a process of its own: trackio reads where its database is when it is imported."""
    pytest.importorskip("trackio")
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from pathlib import Path; from test_trackers import train\n"
        "train('trackio', Path('tool')); train('trackio', Path('tool'), steps=5, resumed=True)\n"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "db"), "HF_HUB_OFFLINE": "1"}
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script, str(here), str(here.parent)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    (database,) = (tmp_path / "db").glob("dwindle*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [step for _, step, _ in rows] == [1, 2, 3, 5] and {name[:5] for name, _, _ in rows} == {"mine-"}
    assert b'"loss"' in bytes(rows[0][2])
