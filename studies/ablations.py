"""Ablations: one setting changed at a time from pruning-aware A; the validation books decide.

    python studies/ablations.py --data textbooks.train.jsonl.xz --valid textbooks.valid.jsonl.xz \\
        --wikitext wikitext-2-raw.test.txt --tokens 16M --budget 540 --out docs/results/ablations.json

Rows are ``base`` and ``<choice>-<value>``; ``--rows horizon`` is all rows of that choice. An impossible row (such as a
ratio with too few steps for its events) is recorded with the reason. Call it again to continue.
"""

from __future__ import annotations

from common import Row, run_study

CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "horizon": {f"{share}%": (f"prune.horizon={share / 100}",) for share in (5, 10, 20, 30, 40, 60)},
    "ratio": {ratio: (f"prune.ratio={ratio}",) for ratio in ("4:1", "2:1", "1:1", "1:2", "1:4", "1:9")},
    "smoothing": {str(factor): (f"prune.smoothing={factor}",) for factor in (0.5, 0.9)},
    "fisher": {"adam": ("prune.fisher=adam",)},
    "compare": {"sum": ("prune.compare=sum",)},
    "groups": {"no-stem": ("prune.groups=attn,ffn",)},
    "metric": {metric: (f"prune.metric={metric}",) for metric in ("taylor1", "obd", "wanda")},
    "batch": {size: (f"training.tokens_per_step={size}",) for size in ("8192", "16384", "32768", "65536")},
    "lr": {rate: (f"training.lr={rate}",) for rate in ("3e-4", "5e-4", "2e-3", "3e-3")},
    "attention": {"cluster": ("prune.attention=cluster",)},
    "kd": {
        "0.25": ("distill.weight=0.25",),
        "0.5": ("distill.weight=0.5",),
        "0.75": ("distill.weight=0.75",),
        "1": ("distill.weight=1.0",),
        "0.5-t2": ("distill.weight=0.5", "distill.temperature=2.0"),
        "0.5-top64": ("distill.weight=0.5", "distill.top_k=64"),
    },
    "order": {"b": ("prune.second_order=true",)},
    "second-order": {
        f"{order}-{tokens}": (f"training.tokens={tokens}", f"prune.second_order={str(order == 'b').lower()}")
        for tokens in ("1M", "2M", "4M")
        for order in ("a", "b")
    },
}
ROWS = {"base": Row("base")} | {
    f"{choice}-{value}": Row(f"{choice} {value}", overrides)
    for choice, values in CHOICES.items()
    for value, overrides in values.items()
}
GROUPS = {choice: [f"{choice}-{value}" for value in values] for choice, values in CHOICES.items()}

if __name__ == "__main__":
    run_study("ablations", __doc__, ROWS, GROUPS)
