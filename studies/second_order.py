"""The second-order update (EfficientLLM-B) and the metrics: what they gain without training.

    PYTHONPATH=src python3 studies/second_order.py quality --model DIR --data textbooks.train.jsonl.xz \\
        --valid textbooks.valid.jsonl.xz --out OUT
    PYTHONPATH=src python3 studies/second_order.py solve --out OUT          # the linear algebra alone

Each prints its table last and writes JSON (and the figure of ``quality``) to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dwindle.commands.main import run_command
from dwindle.pruning.gram import Gram, Sample, cholesky, finished, removal_update, spread
from dwindle.run.compare import compare


class Downdate:
    """Removes inputs one after the other from one factorisation of H; equals the removal in one block.

    The columns of the remaining inverse follow from those already used (a Schur complement), so a removal costs two
    triangular solves; neither the inverse nor a second factor is formed.
    """

    def __init__(self, gram_NN: Tensor, damping: float) -> None:
        self._factor, is_whole = cholesky(gram_NN, damping * gram_NN.diagonal().mean())
        assert is_whole, "this Gram is singular: raise the damping"
        self._removed = torch.zeros(0, dtype=torch.long, device=gram_NN.device)
        self._used_NQ = gram_NN.new_zeros(len(gram_NN), 0)

    def remove(self, w_ON: Tensor, removed_P: Tensor) -> Tensor:
        """Update the other columns of W in place and zero these."""
        unit_NP = self._factor.new_zeros(len(self._factor), len(removed_P))
        unit_NP[removed_P, torch.arange(len(removed_P), device=removed_P.device)] = 1
        z_NP = torch.cholesky_solve(unit_NP, self._factor)
        z_NP -= self._used_NQ @ self._used_NQ[removed_P].T
        root_PP: Tensor = torch.linalg.cholesky(z_NP[removed_P])
        scaled_PN: Tensor = torch.linalg.solve_triangular(root_PP, z_NP.T, upper=False)
        w_ON -= torch.linalg.solve_triangular(root_PP, w_ON[:, removed_P].T, upper=False).T @ scaled_PN
        self._used_NQ = torch.cat([self._used_NQ, scaled_PN.T], dim=1)
        self._removed = torch.cat([self._removed, removed_P])
        w_ON[:, self._removed] = 0
        return w_ON


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quality", "solve"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", action="append")
    parser.add_argument("--valid", action="append")
    parser.add_argument("--metrics", default="taylor,taylor1,obd,wanda,obc,magnitude,random")
    parser.add_argument("--to", default="10%nonemb,20%nonemb,30%nonemb")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--valid-tokens", type=int, default=131072)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="solve: small matrices, to try the script on a CPU")
    return parser.parse_args()


def quality(args: argparse.Namespace) -> Table:
    result = compare(
        args.model,
        metrics=args.metrics.split(","),
        to=args.to.split(","),
        second_order=True,
        data=args.data or [],
        valid=args.valid or [],
        out=args.out,
        overwrite=True,
        device=args.device,
        sequences=args.sequences,
        seq_len=args.seq_len,
        valid_tokens=args.valid_tokens,
        seed=args.seed,
    )
    return result.render()


def milliseconds(task: Callable[[], object], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        task()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def solve(args: argparse.Namespace) -> Table:
    """Time a layer's update in all variants: from the Gram matrix, from the inputs, as a block or column by column."""
    args.out.mkdir(parents=True, exist_ok=True)
    widths = [(256, 128), (256, 1024)] if args.tiny else [(2048, 4096), (8192, 4096), (8192, 32768)]
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    table = Table("inputs", "tokens", "columns", "gram, ms", "from gram, ms", "from inputs, ms", "downdates, ms")
    rows = []
    for width, tokens in widths:
        x = torch.randn(tokens, width, device=args.device, dtype=dtype)
        weight = torch.randn(2048 if width > 1024 else 64, width, device=args.device)
        gram = Gram()
        gram.add(x)
        for count in (1, 4, 64):
            removed, kept = torch.arange(count, device=args.device), torch.arange(count, width, device=args.device)

            def block(seen: Gram | Sample, removed: Tensor = removed, kept: Tensor = kept, w: Tensor = weight) -> None:
                (a_PR,) = finished([seen.regression(removed, kept, 0.01)])
                removal_update(w, removed, spread(a_PR, kept, w.shape[1]))

            def downdates(gram: Gram = gram, removed: Tensor = removed, w: Tensor = weight) -> None:
                downdate = Downdate(gram.matrix_NN, 0.1)
                for column in removed:
                    downdate.remove(w, column[None])

            sample = Sample([x])

            def accumulate(x: Tensor = x) -> None:
                Gram().add(x)

            row = {
                "inputs": width,
                "tokens": tokens,
                "columns": count,
                "gram": milliseconds(accumulate, args.device),
                "from gram": milliseconds(lambda g=gram, b=block: b(g), args.device),  # type: ignore[misc]
                "from inputs": milliseconds(lambda s=sample, b=block: b(s), args.device),  # type: ignore[misc]
                "downdates": milliseconds(downdates, args.device),
            }
            rows.append(row)
            table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    (args.out / "solve.json").write_text(json.dumps(rows, indent=1))
    return table


def main() -> None:
    args = arguments()
    table = {"quality": quality, "solve": solve}[args.what](args)
    Console(width=160).print(table)


if __name__ == "__main__":
    run_command(main)
