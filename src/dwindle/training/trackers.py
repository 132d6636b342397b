"""Where a run's numbers are shown beside ``metrics.jsonl``: TensorBoard, trackio, Weights & Biases, MLflow.

Each is a callback of a few lines over the tool's own package. None is needed, and all keep to this machine unless
``logging.online`` is set. A tool that fails while the run trains is left out with a warning: the run is worth more.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dwindle.core.errors import UserError, first_line
from dwindle.core.files import write_text_atomic
from dwindle.training.callbacks import Callback
from dwindle.training.config import LoggingConfig

if TYPE_CHECKING:
    from dwindle.training.loop import Trainer


class TrackerWarning(UserWarning):
    """A tool that shows the run's numbers failed; the run goes on without it."""


class Tracker(Callback):
    """One tool: ``open`` it for a run (``step`` > 0: one that is resumed), ``log`` numbers, ``close`` it.

    ``folder`` is the tool's own place in the run directory, ``settings`` the recipe's tables of interest.
    """

    package = ""
    quiet: Mapping[str, str] = {}
    """Environment variables that keep the package itself from calling home."""
    remote: tuple[str, ...] = ()
    """Environment variables that would send the numbers elsewhere."""

    def __init__(self, folder: Path, config: LoggingConfig, title: str, settings: Mapping[str, Any]) -> None:
        require_installed([self.package])
        self.folder, self.config, self.title, self.settings = folder, config, title, dict(settings)
        self._tool: Any = None

    def open(self, step: int) -> Any:
        raise NotImplementedError

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._tool.log(numbers, step=step)

    def close(self) -> None:
        """Write what is not written yet."""
        self._tool.finish()

    def run_id(self, step: int) -> str:
        """The tool's name for this run: new at its beginning, the same when it is resumed."""
        place = self.folder / "run-id"
        if step == 0 or not place.is_file():
            write_text_atomic(place, uuid.uuid4().hex[:12])
        return place.read_text(encoding="utf-8").strip()

    def on_start(self, trainer: Trainer) -> None:
        def begin() -> None:
            with nullcontext() if self.config.online else self._kept_here():
                self._tool = self.open(trainer.step)

        self._try(begin)

    @contextmanager
    def _kept_here(self) -> Iterator[None]:
        for name, value in self.quiet.items():
            os.environ.setdefault(name, value)
        hidden = {name: os.environ.pop(name) for name in self.remote if name in os.environ}
        try:
            yield
        finally:
            os.environ.update(hidden)

    def after_step(self, trainer: Trainer) -> None:
        if self._tool is not None:
            self._try(lambda: self.log(numbers_of(trainer), trainer.step))

    def on_end(self, trainer: Trainer) -> None:
        if self._tool is not None:
            self._try(self.close)
            self._tool = None

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._tool = None
            text = f"logging.to: {self.package} failed ({first_line(error)}): the run goes on without it"
            warnings.warn(text, TrackerWarning, stacklevel=2)


def numbers_of(trainer: Trainer) -> dict[str, float]:
    """The finite numbers of the last step."""
    last = trainer.last
    assert last is not None
    numbers = {"loss": last.loss, "grad_norm": last.grad_norm, "lr": last.lr, "tokens": trainer.tokens}
    numbers |= trainer.extra_metrics
    numbers["tokens_per_s"] = last.num_tokens / max(last.seconds, 1e-9)
    return {name: n for name, n in numbers.items() if isinstance(n, (int, float)) and math.isfinite(n)}


class TensorBoard(Tracker):
    """Event files in the run directory; a resumed run hides the steps written after its checkpoint."""

    package = "tensorboard"

    def open(self, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._tool.add_scalar(name, value, step)

    def on_checkpoint(self, trainer: Trainer) -> None:
        if self._tool is not None:
            self._try(self._tool.flush)

    def close(self) -> None:
        self._tool.close()


class Trackio(Tracker):
    """trackio's own database on this machine (``trackio show``)."""

    package = "trackio"
    remote = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")

    def open(self, step: int) -> Any:
        name = f"{self.title}-{self.run_id(step)[:6]}"
        trackio = import_module("trackio")
        trackio.init(project=self.config.project, name=name, config=self.settings, resume="allow", embed=False)
        return trackio


class WeightsAndBiases(Tracker):
    """Files in the run directory; ``wandb sync`` sends them, ``logging.online`` does so while the run trains."""

    package = "wandb"
    quiet: Mapping[str, str] = {"WANDB_ERROR_REPORTING": "false"}

    def open(self, step: int) -> Any:
        self.folder.mkdir(parents=True, exist_ok=True)
        wandb = import_module("wandb")
        return wandb.init(
            project=self.config.project,
            name=self.title,
            id=self.run_id(step),
            dir=str(self.folder),
            config=self.settings,
            resume="allow",
            mode="online" if self.config.online else "offline",
            settings=wandb.Settings(silent=True),
        )


class MLflow(Tracker):
    """A database in the run directory; with ``logging.online`` the server that ``MLFLOW_TRACKING_URI`` names."""

    package = "mlflow"
    quiet: Mapping[str, str] = {"MLFLOW_DISABLE_TELEMETRY": "true"}

    def open(self, step: int) -> Any:
        self.folder.mkdir(parents=True, exist_ok=True)
        mlflow = import_module("mlflow")
        local = f"sqlite:///{(self.folder / 'mlflow.db').resolve()}"
        client = mlflow.MlflowClient(tracking_uri=None if self.config.online else local)
        experiment = client.get_experiment_by_name(self.config.project)
        place = str((self.folder / "artifacts").resolve().as_uri())
        number = experiment.experiment_id if experiment else client.create_experiment(self.config.project, place)
        tag = self.run_id(step)
        found = client.search_runs([number], f"tags.dwindle = '{tag}'")
        self._run = found[0].info.run_id if found else self._created(client, number, tag)
        return client

    def _created(self, client: Any, experiment: str, tag: str) -> str:
        run = client.create_run(experiment, run_name=self.title, tags={"dwindle": tag})
        for section, values in self.settings.items():
            for key, value in values.items():
                client.log_param(run.info.run_id, f"{section}.{key}", value)
        return str(run.info.run_id)

    def log(self, numbers: dict[str, float], step: int) -> None:
        entities = import_module("mlflow.entities")
        now = int(time.time() * 1000)
        self._tool.log_batch(
            self._run, metrics=[entities.Metric(name, float(value), now, step) for name, value in numbers.items()]
        )

    def close(self) -> None:
        self._tool.set_terminated(self._run)


TRACKERS: dict[str, type[Tracker]] = {tool.package: tool for tool in (TensorBoard, Trackio, WeightsAndBiases, MLflow)}


def require_installed(tools: list[str]) -> None:
    """Refuse a tool whose package is missing."""
    for name in tools:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"logging.to: {name} is not installed: run `pip install {name}`")


def chosen_tools(config: LoggingConfig) -> list[str]:
    """The tools of a run; where none are named, TensorBoard if it is installed."""
    if config.to is not None:
        return list(dict.fromkeys(config.to))
    return ["tensorboard"] if importlib.util.find_spec("tensorboard") is not None else []
