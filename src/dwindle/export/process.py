"""Runs an inference runtime in a child process: a crash becomes an error message, and its peak memory can be read.

Parent and child exchange one JSON object per line. The child imports torch only if its engine does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dwindle.core.errors import UserError

ENGINES = {
    "llamacpp": "dwindle.export.llamacpp:LlamaCppEngine",
    "llamacpp-default": "dwindle.export.llamacpp:DefaultLlamaCppEngine",
    "onnx": "dwindle.export.onnx_runtime:OnnxEngine",
    "executorch": "dwindle.export.executorch_runtime:ExecutorchEngine",
    "torch": "dwindle.export.torch_runtime:TorchEngine",
}


_LOG_PREFIX = re.compile(r"^[\d.]+ [A-Z] ")
"""Time and log level at the start of llama.cpp's log lines."""


class CachedEngine:
    """A runtime whose cache is kept between calls: the greedy continuation, and its time."""

    def reset(self, padding: Sequence[int] = (0,)) -> None:
        """Empty the cache; the first step of each row begins with so many tokens that do not count."""
        raise NotImplementedError

    def step(self, rows: Any) -> Any:
        """Logits [rows, new, vocabulary], as numpy, of token ids [rows, new] that follow the cached ones."""
        raise NotImplementedError

    def next(self, ids: list[int]) -> int:
        """The likeliest next token."""
        return int(self.step([ids])[0, -1].argmax())

    def generate(self, ids: list[int], count: int, end: int | None = None) -> list[int]:
        """The greedy continuation, at most ``count`` tokens or up to the token ``end``."""
        self.reset()
        fresh, found = list(ids), list[int]()
        while len(found) < count:
            fresh = [self.next(fresh)]
            if fresh[0] == end:
                break
            found += fresh
        return found

    def timed(self, ids: list[int], new_tokens: int) -> tuple[float, float]:
        """Milliseconds for the whole prompt and per generated token."""
        self.reset()
        start = time.perf_counter()
        token = self.next(ids)
        middle = time.perf_counter()
        for _ in range(new_tokens):
            token = self.next([token])
        end = time.perf_counter()
        return (middle - start) * 1e3, (end - middle) * 1e3 / new_tokens


class RuntimeFailure(Exception):
    """The runtime rejected the model or crashed; the message is its own error."""


class RuntimeProcess:
    """``with RuntimeProcess("llamacpp", path, threads=1) as runtime: runtime.call("greedy", ids=…, count=64)``"""

    def __init__(self, engine: str, path: str | os.PathLike[str], *, threads: int = 1, context: int = 512) -> None:
        self.engine = engine
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._printed = 0
        command = [sys.executable, "-m", "dwindle.export.process", engine, str(path), str(threads), str(context)]
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **limits, "PYTHONPATH": _import_path()},
        )
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the engine in the child and return its result."""
        assert self._child.stdin is not None
        try:
            print(json.dumps({"method": method, "arguments": arguments}), file=self._child.stdin, flush=True)
        except OSError as error:
            raise RuntimeFailure(f"{self.engine} stopped: {self._reported_error()}") from error
        return self._receive()

    def _receive(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._child.wait()
            raise RuntimeFailure(f"{self.engine} stopped: {self._reported_error()}")
        reply = json.loads(line)
        if "user_error" in reply:
            raise UserError(reply["user_error"])
        if "error" in reply:
            raise RuntimeFailure(f"{self.engine}: {self._reported_error(reply['error'])}")
        self._printed = os.fstat(self._stderr.fileno()).st_size
        return reply["result"]

    def _reported_error(self, fallback: str = "") -> str:
        """The first error that the library printed in this call; later ones only report that something failed."""
        self._stderr.seek(self._printed)
        printed = (_LOG_PREFIX.sub("", line).strip() for line in self._stderr.read().splitlines())
        lines = [" ".join(line.split()) for line in printed if line]
        errors = [line for line in lines if "error" in line.lower()]
        return (errors or ([fallback] if fallback else lines[-1:]) or [f"exit code {self._child.returncode}"])[0]

    def close(self) -> None:
        """Close the child's input, on which it exits; kill it if it has not exited after 20 s."""
        if self._child.stdin is not None and not self._child.stdin.closed:
            with suppress(OSError):
                self._child.stdin.close()
        try:
            self._child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def peak_memory_bytes() -> int:
    """Peak resident memory of this process; 0 if the platform does not report it.

    On Linux ``getrusage`` of a forked child includes its parent's peak, so ``VmHWM`` is read instead.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _import_path() -> str:
    """``PYTHONPATH`` with which the child imports this same package, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    others = os.environ.get("PYTHONPATH")
    return f"{root}{os.pathsep}{others}" if others else root


def _serve(engine_name: str, path: str, threads: int, context: int) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not mix with the replies

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    module, _, name = ENGINES[engine_name].partition(":")
    try:
        engine: Any = getattr(import_module(module), name)(path, threads=threads, context=context)
    except UserError as error:
        return answer(user_error=str(error))
    except Exception as error:
        return answer(error=f"{type(error).__name__}: {error}")
    answer(result=None)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["method"] == "peak_memory":
                answer(result=peak_memory_bytes())
            else:
                answer(result=getattr(engine, request["method"])(**request["arguments"]))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
