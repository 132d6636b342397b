"""The identity of a source: a hash of the files that a run reads from it, so that ``resume`` notices another one."""

from __future__ import annotations

import hashlib
import os
from fnmatch import fnmatch
from pathlib import Path

from dwindle.core.reading import open_regular
from dwindle.sources import huggingface
from dwindle.sources.loading import locate

_WHOLE_BYTES = 1 << 24
"""Files up to this size are hashed whole."""
_SAMPLES, _SAMPLE_BYTES = 256, 1 << 14


def source_fingerprint(source: str | os.PathLike[str]) -> str:
    """SHA-256 over the names, sizes and contents of a source's files; of weights, evenly spaced samples.

    Two models differ almost everywhere, so samples distinguish them in a tenth of a second at any size; they do not
    find a single flipped bit, which is the business of the disk.
    """
    kind, path = locate(os.fspath(source), weights=True)
    if kind == "huggingface":
        patterns = huggingface.MODEL_FILES
        files = sorted(file for file in path.iterdir() if any(fnmatch(file.name, pattern) for pattern in patterns))
    else:
        files = [path, *sorted(path.parent.glob("tok*.bin") if kind == "llama2c" else ())]
    sha = hashlib.sha256()
    for file in files:
        if file.is_file():
            sha.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            _update(sha, file)
    return sha.hexdigest()


def _update(sha: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    with open_regular(file) as handle:
        if size <= _WHOLE_BYTES:
            sha.update(handle.read(_WHOLE_BYTES))
            return
        for number in range(_SAMPLES):
            handle.seek(number * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            sha.update(handle.read(_SAMPLE_BYTES))
