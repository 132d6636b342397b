"""Benchmarks prefill and decoding of several models side by side, as ratios to the first.

Models take turns within every repetition, so that other load on the machine affects all of them alike; medians are
reported with quartiles. The share of a token's time outside the layers (embedding, head, sampling, which pruning does
not reduce) is measured by timing a copy with one layer in the same turns: ``outside = t₁ − (t_L − t₁) / (L − 1)``.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Column, Table

from dwindle.core.errors import UserError
from dwindle.core.files import folder_size
from dwindle.core.names import public_name
from dwindle.core.notebook import Shown
from dwindle.core.progress import Bar
from dwindle.core.sizes import at_least, format_bytes, format_count
from dwindle.core.terminal import right
from dwindle.export.process import RuntimeFailure, RuntimeProcess
from dwindle.export.torch_runtime import TorchEngine, one_layer
from dwindle.sources.loading import Loaded, load

RUNTIMES = ("torch", "llamacpp", "onnx", "executorch", "executorch-int8")
_FORMATS = {"llamacpp": ("gguf", ".gguf"), "onnx": ("onnx", ""), "executorch": ("executorch", ".pte")}
"""Format and suffix of what a runtime reads."""
ROUND = 64
"""Widths that are multiples of this are fast in most kernels."""

Timed = Callable[[list[int], int], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __format__(self, spec: str) -> str:
        """The quartiles are on a second line, so that columns stay narrow."""
        return f"{self.median:{spec}}\n{self.low:{spec}}–{self.high:{spec}}"


@dataclass(frozen=True, slots=True)
class Latency:
    """One model in one runtime with one number of threads."""

    name: str
    runtime: str
    threads: int
    parameters: int
    num_bytes: int
    prefill_ms: Spread
    """Per token of the prompt."""
    decode_ms: Spread
    """Per generated token."""
    outside_share: float | None
    """Share of the time per generated token that is spent outside the layers."""
    peak_memory: int | None
    odd_sizes: str
    """Widths that are not multiples of ``ROUND``."""
    prefill_speedup: float = 1.0
    decode_speedup: float = 1.0
    """Median over repetitions of baseline time / own time."""

    @property
    def tokens_per_second(self) -> float:
        return 1e3 / self.decode_ms.median

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "runtime": self.runtime,
            "threads": self.threads,
            "parameters": self.parameters,
            "bytes": self.num_bytes,
            "prefill_ms_per_token": asdict(self.prefill_ms),
            "decode_ms_per_token": asdict(self.decode_ms),
            "tokens_per_second": self.tokens_per_second,
            "outside_layers_share": self.outside_share,
            "peak_memory_bytes": self.peak_memory,
            "odd_sizes": self.odd_sizes,
            "prefill_speedup": self.prefill_speedup,
            "decode_speedup": self.decode_speedup,
        }


@dataclass(slots=True)
class LatencyTable(Shown):
    """All rows of a benchmark; the first model of each runtime and thread count is the baseline."""

    rows: list[Latency] = field(default_factory=list)
    prompt_tokens: int = 0
    new_tokens: int = 0
    repeats: int = 0
    type: str = ""

    def row(self, name: str, runtime: str = "torch", threads: int | None = None) -> Latency:
        return next(r for r in self.rows if r.name == name and r.runtime == runtime and threads in (None, r.threads))

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "gguf_type": self.type,
            "rows": [row.to_json() for row in self.rows],
        }

    def notes(self) -> list[str]:
        """Explains smaller models that are not faster."""
        found = []
        for row in self.rows:
            base = next(r for r in self.rows if (r.runtime, r.threads) == (row.runtime, row.threads))
            expected = base.parameters / row.parameters
            if row.parameters >= base.parameters or row.decode_speedup >= 1 + 0.5 * (expected - 1):
                continue
            why = [f"{row.outside_share:.0%} of its time lies outside the layers"] if row.outside_share else []
            if row.odd_sizes:
                why.append(f"odd sizes ({row.odd_sizes}): export it with --round {ROUND}")
            found.append(
                f"{row.name} ({row.runtime}, threads: {row.threads}) has {1 / expected:.0%} of the parameters but "
                f"decodes only {row.decode_speedup:.2f} × as fast" + (f": {'; '.join(why)}" if why else "")
            )
        return found

    def render(self) -> Group:
        """Tables of time and of size, each at most 80 columns wide, then the notes."""
        time = _table("prefill\nms/token", "decode\nms/token", "prefill\n×", "decode\n×")
        size = _table("tokens/s", "params", "file", "outside\nlayers", "peak\nmemory")
        for row in self.rows:
            which = (row.name, f"{row.runtime}, {row.threads}")
            ratios = (f"{row.prefill_speedup:.2f}", f"{row.decode_speedup:.2f}")
            time.add_row(*which, f"{row.prefill_ms:.2f}", f"{row.decode_ms:.2f}", *ratios)
            size.add_row(
                *which,
                f"{row.tokens_per_second:.1f}",
                format_count(row.parameters),
                format_bytes(row.num_bytes),
                f"{row.outside_share:.0%}" if row.outside_share is not None else "-",
                format_bytes(row.peak_memory) if row.peak_memory else "-",
            )
        title = (
            f"latency: prompt of {self.prompt_tokens}, {self.new_tokens} new tokens, batch 1; median of {self.repeats} "
            "interleaved repetitions, with quartiles below"
        )
        return Group(title, "", time, "", size, *(["", *self.notes()] if self.notes() else []))


def _table(*columns: str) -> Table:
    """A table with columns for model and runtime; only the model's name may be folded."""
    first = (Column("model", overflow="fold"), Column("runtime,\nthreads", no_wrap=True))
    return Table(*first, *right(*columns, no_wrap=True), box=None, padding=(0, 2, 0, 0))


@dataclass(slots=True)
class _Runner:
    """A model ready to be timed, and its copy with a single layer."""

    name: str
    timed: Timed
    timed_one_layer: Timed | None
    parameters: int
    num_layers: int
    vocab_size: int
    num_bytes: int
    odd_sizes: str
    process: RuntimeProcess | None = None


def measure_latency(
    models: Mapping[str, Any] | Sequence[str | os.PathLike[str]],
    *,
    runtime: str | Sequence[str] = "torch",
    threads: int | Sequence[int] = 1,
    prompt_tokens: int = 64,
    new_tokens: int = 32,
    repeats: int = 5,
    type: str = "f16",
    round_to: int | None = None,
) -> LatencyTable:
    """Time models side by side; the first one is the baseline of all ratios.

    ``models`` maps names to models in memory or to sources for ``dwindle.load``. With torch, models in memory run in
    this process; everything else runs in a child process, whose peak memory is reported. For llama.cpp and ONNX the
    models are exported to a temporary folder first (GGUF in ``type``; ``round_to`` pads unaligned widths).
    """
    runtimes = [runtime] if isinstance(runtime, str) else list(runtime)
    counts = [threads] if isinstance(threads, int) else list(threads)
    named = dict(models) if isinstance(models, Mapping) else named_models(models)
    _check(named, runtimes, counts, prompt_tokens, new_tokens, repeats)
    table = LatencyTable([], prompt_tokens, new_tokens, repeats, type)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dwindle-latency-")))
        steps = len(runtimes) * len(counts) * (repeats + 1) * len(named)
        bar = stack.enter_context(Bar("measuring latency", steps))
        sources = {
            name: _Source(name, number, given, work, type, round_to)
            for number, (name, given) in enumerate(named.items())
        }
        for which in runtimes:
            for count in counts:
                with ExitStack() as running:
                    context = prompt_tokens + new_tokens + 8
                    runners = [source.runner(which, count, context, running) for source in sources.values()]
                    table.rows += _compare(runners, which, count, table, bar)
    return table


def _compare(runners: list[_Runner], runtime: str, threads: int, table: LatencyTable, bar: Bar) -> list[Latency]:
    generator = torch.Generator().manual_seed(0)
    vocab_size = min(runner.vocab_size for runner in runners)
    prompt = torch.randint(vocab_size, (table.prompt_tokens,), generator=generator).tolist()
    prefill: dict[str, list[float]] = {r.name: [] for r in runners}
    decode: dict[str, list[float]] = {r.name: [] for r in runners}
    single: dict[str, list[float]] = {r.name: [] for r in runners}
    for turn in range(table.repeats + 1):
        for runner in runners if turn % 2 else reversed(runners):
            first, then = runner.timed(prompt, table.new_tokens)
            alone = runner.timed_one_layer(prompt, table.new_tokens)[1] if runner.timed_one_layer else None
            bar.advance()
            if turn == 0:  # warm-up
                continue
            prefill[runner.name].append(first / table.prompt_tokens)
            decode[runner.name].append(then)
            single[runner.name] += [alone] if alone is not None else []
    base = runners[0].name
    return [
        Latency(
            name=runner.name,
            runtime=runtime,
            threads=threads,
            parameters=runner.parameters,
            num_bytes=runner.num_bytes,
            prefill_ms=Spread.of(prefill[runner.name]),
            decode_ms=Spread.of(decode[runner.name]),
            outside_share=_outside(decode[runner.name], single[runner.name], runner.num_layers),
            peak_memory=_peak_memory(runner),
            odd_sizes=runner.odd_sizes,
            prefill_speedup=_ratio(prefill[base], prefill[runner.name]),
            decode_speedup=_ratio(decode[base], decode[runner.name]),
        )
        for runner in runners
    ]


def _peak_memory(runner: _Runner) -> int | None:
    if runner.process is None:
        return None
    with _run_of(runner.name):
        return int(runner.process.call("peak_memory")) or None


@contextmanager
def _run_of(name: str) -> Iterator[None]:
    """Turn a runtime's failure into a ``UserError`` that names the model."""
    try:
        yield
    except RuntimeFailure as error:
        raise UserError(
            f"bench latency: {name} cannot be run ({error}): check the file, or choose another --runtime"
        ) from error


def _ratio(baseline: list[float], values: list[float]) -> float:
    """Median of the ratios within each turn, which cancels drift of the machine."""
    return statistics.median(b / v for b, v in zip(baseline, values, strict=True))


def _outside(whole: list[float], single: list[float], num_layers: int) -> float | None:
    if not single or num_layers < 2:
        return None
    full, one = statistics.median(whole), statistics.median(single)
    return min(1.0, max(0.0, (one - (full - one) / (num_layers - 1)) / full))


def named_models(models: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Names without their folders if they are unique, else full paths; a model given twice (to see the noise) is
    numbered."""
    paths = [os.fspath(model) for model in models]
    short = [Path(public_name(path)).name or path for path in paths]  # of a run's model the run's
    names = short if len(set(short)) == len(set(paths)) else paths
    named: dict[str, Any] = {}
    for name, path in zip(names, paths, strict=True):
        numbered = (f"{name} ({number})" for number in itertools.count(2))
        named[next(key for key in itertools.chain([name], numbered) if key not in named)] = path
    return named


def _check(
    models: dict[str, Any], runtimes: list[str], threads: list[int], prompt_tokens: int, new_tokens: int, repeats: int
) -> None:
    if not models:
        raise UserError("bench latency: give at least one model")
    for runtime in runtimes:
        if runtime not in RUNTIMES:
            raise UserError(f"--runtime {runtime!r}: give one or more of {', '.join(RUNTIMES)}")
    available = os.cpu_count() or 1
    for count in threads:
        if not 1 <= count <= available:
            raise UserError(f"--threads {count}: this machine has {available} CPUs: give 1 to {available}")
    at_least(1, **{"--prompt": prompt_tokens, "--new": new_tokens, "--repeats": repeats})


@dataclass(slots=True)
class _Source:
    """A model in the formats of the runtimes, exported on first use."""

    name: str
    number: int
    given: Any
    work: Path
    type: str
    round_to: int | None
    _loaded: Loaded | None = None
    _files: dict[str, tuple[Path, Path | None]] = field(default_factory=dict)

    def runner(self, runtime: str, threads: int, context: int, running: ExitStack) -> _Runner:
        model = self.loaded().model
        facts = {
            "name": self.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "num_layers": int(model.config.num_hidden_layers),
            "vocab_size": int(model.config.vocab_size),
            "odd_sizes": unaligned_widths(model, 1 if runtime == "torch" else self.round_to or 1),
        }
        if runtime == "torch" and not isinstance(self.given, (str, os.PathLike)):
            live = TorchEngine(model, threads=threads)
            size = sum(p.nbytes for p in model.parameters())
            return _Runner(timed=live.timed, timed_one_layer=live.timed_one_layer, num_bytes=size, **facts)
        path, single = self.files(runtime)
        engine = "llamacpp-default" if runtime == "llamacpp" else runtime.removesuffix("-int8")
        with _run_of(self.name):
            process = running.enter_context(RuntimeProcess(engine, path, threads=threads, context=context))
            one_timed = _remote(self.name, process, "timed_one_layer") if runtime == "torch" else None
            if single is not None:
                other = running.enter_context(RuntimeProcess(engine, single, threads=threads, context=context))
                one_timed = _remote(self.name, other)
        size = _file_size(path) or sum(p.nbytes for p in model.parameters())
        timed = _remote(self.name, process)
        return _Runner(timed=timed, timed_one_layer=one_timed, num_bytes=size, process=process, **facts)

    def loaded(self) -> Loaded:
        if self._loaded is None:
            if isinstance(self.given, Loaded):
                self._loaded = self.given
            elif isinstance(self.given, (str, os.PathLike)):
                self._loaded = load(self.given)
            else:
                self._loaded = Loaded(self.given, None, self.name, "huggingface")
        return self._loaded

    def files(self, runtime: str) -> tuple[Path, Path | None]:
        """The model in the runtime's format, and its copy with one layer if that is a separate file."""
        if runtime not in self._files:
            whole = self.loaded()
            given = Path(whole.source)
            if runtime == "torch":
                self._files[runtime] = given, None
            elif runtime == "llamacpp" and isinstance(self.given, (str, os.PathLike)) and given.suffix == ".gguf":
                self._files[runtime] = given, None  # timed as is, in its own type
            else:
                # Not under the source's name, whose structure.json and ledger describe all layers.
                single = Loaded(one_layer(whole.model), whole.tokenizer, f"{self.name}, one layer", whole.kind)
                self._files[runtime] = self._write(runtime, "whole", whole), self._write(runtime, "one", single)
        return self._files[runtime]

    def _write(self, runtime: str, which: str, loaded: Loaded) -> Path:
        from dwindle.export.exporting import export

        to, suffix = _FORMATS[runtime.removesuffix("-int8")]
        target = self.work / f"{self.number}-{which}-{runtime}{suffix}"
        kind = {"llamacpp": self.type, "executorch-int8": "int8"}.get(runtime)
        out = export(loaded, to, target, type=kind, round_to=self.round_to, verify=False).out
        return out / "model.onnx" if to == "onnx" else out


def _remote(name: str, process: RuntimeProcess, method: str = "timed") -> Timed:
    def timed(ids: list[int], new_tokens: int) -> tuple[float, float]:
        with _run_of(name):
            first, then = process.call(method, ids=ids, new_tokens=new_tokens)
        return float(first), float(then)

    return timed


def unaligned_widths(model: Any, round_to: int = 1) -> str:
    """Widths that are not multiples of 64 after padding to ``round_to``, as text."""
    from dwindle.anatomy.anatomy import Anatomy

    structure = Anatomy.of(model).source
    widths = {"hidden": [len(structure.hidden)], "FFN": sorted({len(la.ffn) for la in structure.layers})}
    padded = {name: sorted({-(-size // round_to) * round_to for size in sizes}) for name, sizes in widths.items()}
    odd = {name: [size for size in sizes if size % ROUND] for name, sizes in padded.items()}
    return ", ".join(
        f"{name} {sizes[0]}" + (f"…{sizes[-1]}" if len(sizes) > 1 else "") for name, sizes in odd.items() if sizes
    )


def _file_size(path: Path) -> int | None:
    """Bytes of a file or directory; None for aliases and hub ids."""
    if not path.exists():
        return None
    if path.is_dir():
        return folder_size(path)
    data = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (data.stat().st_size if data.is_file() else 0)
