"""Adapt-Accel against pruning once and training afterwards, with the same tokens.

    python studies/adapt_accel.py --model stories260K.bin --data stories.train.txt --valid stories.valid.txt \\
        --sizes 50% --tokens 160k --seeds 0,1,2,3,4 --set data.seq_len=128 training.tokens_per_step=2048 \\
        training.micro_batch=16 training.schedule=wsd training.lr=1e-3 --out docs/results/adapt-accel.json

``once`` is Adapt-Accel with one stage: the same allocation, all of it at the first step. Call it again to continue.
"""

from __future__ import annotations

from common import Row, run_study

_ADAPT = ("prune.method=adapt", "prune.metric=taylor1")
ROWS = {
    "once": Row("prune once, then training", (*_ADAPT, "prune.interleaves=1")),
    "interleaves-5": Row("Adapt-Accel, 5 stages", (*_ADAPT, "prune.interleaves=5")),
    "interleaves-10": Row("Adapt-Accel, 10 stages", (*_ADAPT, "prune.interleaves=10")),
    "interleaves-20": Row("Adapt-Accel, 20 stages", (*_ADAPT, "prune.interleaves=20")),
    "even": Row("10 stages, all layers alike", (*_ADAPT, "prune.interleaves=10", "prune.amplitude=0")),
    "aware": Row("pruning-aware A", ("prune.metric=taylor1", "prune.horizon=0.1")),
    "global": Row("global mixture", ("prune.selection=global", "prune.metric=taylor1", "prune.horizon=0.1")),
}

if __name__ == "__main__":
    run_study("adapt_accel", __doc__, ROWS, {})
