"""The ladder: what each lever adds at equal tokens, from one-shot pruning with a teacher to the best recipe.

    python studies/ladder.py --data wikipedia textbooks elife standardebooks mdn --valid psychology \\
        --wikitext wikitext-2-raw.test.txt --texts marketing=marketing mixed.test=mixed.test \\
        --rows one-shot+kd,global+kd,global-group+kd,global-group-muon+kd@2.5e-3 --sizes 50%nonemb,30%nonemb \\
        --tokens 16M --set training.tokens_per_step=16384 --kd distill.weight=0.75 --out docs/results/ladder.json

A name with ``+kd`` has the untouched source as teacher, one with ``@RATE`` another peak rate. Settings are chosen on
``--valid``; the other texts are only reported. Call it again to continue.
"""

from __future__ import annotations

from common import Row, run_study

GLOBAL = ("prune.selection=global", "prune.round_to=1")
AT_ONCE = (*GLOBAL, "prune.warmup_steps=0")
WARM = (*GLOBAL, "prune.smoothing=0.9", "prune.horizon=0.03")
GROUP = (*GLOBAL, "prune.smoothing=0.95", "prune.metric=group", "prune.horizon=0.03")
SAVED = (*GROUP, "prune.compare=saved")
MUON = ("training.optimizer=muon",)
LONG = ("prune.horizon=0.2", "training.schedule=wsd", "training.decay=0.3")

ADAPT = ("prune.method=adapt", "prune.horizon=none", "training.schedule=wsd")
BEFORE = ("training.tokens_per_step=65536", "training.lr=1e-3", "prune.metric=taylor", "prune.warmup_steps=0")
DEFAULTS = (*GROUP, *MUON, "prune.smoothing=0.5", "training.tokens_per_step=16384", "training.lr=1.5e-3")

ROWS = {
    "source": Row("source, untouched", trained=False, sized=False),
    "adapted": Row("source, adapted to the text", sized=False),
    "adapted-muon": Row("source, adapted to the text with Muon", MUON, sized=False),
    "pruned": Row("one-shot, no training", from_one_shot=True, trained=False),
    "pruned-global": Row("one-shot, global mixture, no training", GLOBAL, from_one_shot=True, trained=False),
    "pruned-group": Row(
        "one-shot, global mixture, group saliency, no training",
        (*GLOBAL, "prune.metric=group"),
        from_one_shot=True,
        trained=False,
    ),
    "rounds": Row("in 32 rounds without training, then training", from_one_shot=True, rounds=32),
    "adapt": Row("Adapt-Accel", ADAPT),
    "smallest-before": Row("smallest recipe before defaults followed this table", BEFORE),
    "smallest": Row("smallest recipe", DEFAULTS),
    "one-shot": Row("one-shot, then training", from_one_shot=True),
    "one-shot-muon": Row("one-shot, then training with Muon", MUON, from_one_shot=True),
    "one-shot-global": Row("one-shot, global mixture, then training", GLOBAL, from_one_shot=True),
    "one-shot-global-muon": Row(
        "one-shot, global mixture, then training with Muon", (*GLOBAL, *MUON), from_one_shot=True
    ),
    "aware-b": Row("pruning-aware B", ("prune.second_order=true",)),
    "global": Row("global mixture", AT_ONCE),
    "global-warm": Row("global mixture after the warm-up, smoothed", WARM),
    "global-group": Row("global mixture, group saliency", GROUP),
    "global-saved": Row("global mixture, group saliency per parameter saved", SAVED),
    "global-muon": Row("global mixture, Muon", (*AT_ONCE, *MUON)),
    "global-warm-muon": Row("global mixture after the warm-up, smoothed, Muon", (*WARM, *MUON)),
    "global-group-muon": Row("global mixture, group saliency, Muon", (*GROUP, *MUON)),
    "global-saved-muon": Row("global mixture, group saliency per parameter saved, Muon", (*SAVED, *MUON)),
    "global-group-muon-8": Row(
        "global mixture, group saliency, Muon, horizon 8 %", (*GROUP, *MUON, "prune.horizon=0.08")
    ),
    "global-group-muon-long": Row("global mixture, group saliency, Muon, horizon 20 %, WSD", (*GROUP, *MUON, *LONG)),
}

if __name__ == "__main__":
    run_study("ladder", __doc__, ROWS, {})
