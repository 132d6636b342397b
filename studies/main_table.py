"""The main table: every way to a smaller model, with the same tokens, at several sizes.

    python studies/main_table.py --data textbooks.train.jsonl.xz --valid textbooks.valid.jsonl.xz \\
        --wikitext wikitext-2-raw.test.txt --tasks-data SETS --sizes 80%nonemb,50%nonemb,30%nonemb \\
        --tokens 16M --budget 540 --out docs/results/main-table.json

A name with ``+kd`` is the same row with a frozen copy of the source as teacher (``--kd`` says how).
Call it again to continue.
"""

from __future__ import annotations

from common import Row, run_study

ROWS = {
    "source": Row("source, untouched", trained=False, sized=False),
    "source-trained": Row("source, trained, not pruned", sized=False),
    "one-shot": Row("one-shot, then training", from_one_shot=True),
    "aware-a": Row("pruning-aware A"),
    "aware-b": Row("pruning-aware B", ("prune.second_order=true",)),
    "adapt": Row(
        "Adapt-Accel", ("prune.method=adapt", "prune.horizon=none", "prune.round_to=1", "training.schedule=wsd")
    ),
    "global": Row("global mixture", ("prune.selection=global", "prune.round_to=1")),
    "global-b": Row("global mixture B", ("prune.selection=global", "prune.round_to=1", "prune.second_order=true")),
    "scratch": Row("from scratch at one-shot's shape", ("source.random_init=true",), from_one_shot=True),
    "one-shot-global": Row(
        "one-shot, global mixture, then training", ("prune.selection=global", "prune.round_to=1"), from_one_shot=True
    ),
    "rounds": Row("in 32 rounds without training, then training", from_one_shot=True, rounds=32),
    "rounds-global": Row(
        "global mixture in 32 rounds without training, then training",
        ("prune.selection=global", "prune.round_to=1"),
        from_one_shot=True,
        rounds=32,
    ),
    "global-32": Row(
        "global mixture, FFN widths multiples of 32",
        ("prune.selection=global", "prune.round_to=32", "prune.groups=attn,ffn"),
    ),
}

if __name__ == "__main__":
    run_study("main_table", __doc__, ROWS, {})
