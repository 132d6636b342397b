"""W8A8 on a real model: perplexity of the source, of plain rounding and of rounding after smoothing, on one long text.

    PYTHONPATH=src python3 studies/quantize_wikitext.py --model smollm2-135m --valid wikitext-2-raw.test.txt --out OUT
    PYTHONPATH=src python3 studies/quantize_wikitext.py --tokens 16384 --valid …          # a part of it, for a CPU

Calibrates on other text (``--data``, by default CPython's documentation). Without ``--tokens``
all complete windows of the text are used. Prints one table per scheme and writes ``quantization.json`` to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dwindle.commands.main import run_command
from dwindle.data.pydoc_text import DEFAULT_TEXT
from dwindle.data.text_windows import validation_windows
from dwindle.quantization.quantize import SCHEMES, quantize
from dwindle.sources.loading import load

EVERYTHING = 10**12


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--valid", required=True, help="text to measure on")
    parser.add_argument("--data", nargs="+", default=[DEFAULT_TEXT], help="text to calibrate on")
    parser.add_argument("--scheme", nargs="+", choices=list(SCHEMES), default=["w8a8"])
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens in a window of --valid")
    parser.add_argument("--tokens", type=int, default=EVERYTHING, help="measure on at most this many; default all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("quantize-wikitext"))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    loaded = load(options.model, device=options.device)
    assert loaded.tokenizer is not None
    windows = validation_windows([options.valid], loaded.tokenizer, options.seq_len, options.tokens, option="--valid")
    record: dict[str, Any] = {
        "model": options.model,
        "valid": Path(options.valid).name,
        "tokens": windows.shape[0] * options.seq_len,
        "seq_len": options.seq_len,
        "calibration": options.data,
        "device": options.device,
        "torch": torch.__version__,
        "schemes": {},
    }
    print(f"{record['tokens']:,} tokens in {len(windows)} windows of {options.seq_len}", flush=True)
    for scheme in options.scheme:
        started = time.perf_counter()
        found = quantize(
            loaded,
            scheme=scheme,
            data=options.data,
            valid=[options.valid],
            valid_seq_len=options.seq_len,
            valid_tokens=options.tokens,
        )
        change = {name: value / found.perplexity["source"] - 1 for name, value in found.perplexity.items()}
        seconds = time.perf_counter() - started
        record["schemes"][scheme] = found.to_json() | {"against_source": change, "seconds": seconds}
        Console(width=120).print(found.render())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quantization.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
