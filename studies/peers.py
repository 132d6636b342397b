"""The peers: other papers' methods and ours, without training and after the same recovery.

    python studies/peers.py --data wikipedia textbooks elife standardebooks mdn --valid psychology \\
        --wikitext wikitext-2-raw.test.txt --texts mixed.test=mixed.test --tasks-data SETS \\
        --sizes 80%nonemb,60%nonemb,50%nonemb --seeds 0,1,2 --tokens 16M --kd distill.weight=0.75 \\
        --set training.optimizer=muon training.lr=2.5e-3 training.tokens_per_step=16384 --out docs/results/peers.json
    python studies/peers_speed.py docs/results/peers.json --model smollm2-135m --out docs/pictures    # on a CPU

A row is a method; ``NAME-trained+kd`` is its result after training with the untouched source as teacher. Text,
optimizer, rate and teacher are the same for all. The rate, 2.5e-3, is the larger of the two that the ladder tried with
Muon (docs/results.md): one-shot is as good at either, ours is worse at this one. LLM-Pruner and Minitron score in eight
rounds, like ours; ShortGPT scores once, as in its paper. Rows of the same method and size share one pruned model.
``--rows pruned`` and ``--rows trained`` name all of either kind. Call it again to continue.
"""

from __future__ import annotations

from common import Row, run_study
from ladder import GLOBAL, GROUP

from dwindle.pruning.methods import METHODS

ROUNDS = 8
REPAIRED = (*GLOBAL, "prune.metric=taylor", "prune.second_order=true")
ZSCORE = ("prune.metric=wanda", "prune.compare=zscore", "prune.second_order=true", "prune.groups=attn,ffn")
"""FLAP's idea in our mixture: the energy of a group's output as a z-score of its layer; the hidden size is kept."""
IN_ROUNDS = ("llm-pruner", "minitron")
METHOD_ROWS: dict[str, tuple[str, tuple[str, ...], int]] = {
    **{
        name: (
            f"{method.paper}, {ROUNDS} rounds" if name in IN_ROUNDS else method.paper,
            (f"prune.method={name}",),
            ROUNDS if name in IN_ROUNDS else 1,
        )
        for name, method in METHODS.items()
        if "metric" not in method.settings and method.without_training
    },
    "adapt": ("Adapt-Pruner", ("prune.method=adapt",), 50),
    "one-shot": ("EfficientLLM, one-shot", ("prune.metric=taylor",), 1),
    "ours-plain": ("global mixture, group saliency", (*GLOBAL, "prune.metric=group"), 1),
    "ours": (f"global mixture in {ROUNDS} rounds, second order (ours)", REPAIRED, ROUNDS),
    "ours-zscore": (
        f"global mixture, z-scores of output energy, {ROUNDS} rounds (ours)",
        (*GLOBAL, *ZSCORE),
        ROUNDS,
    ),
    "ours-32": (
        f"global mixture in multiples of 32, second order, {ROUNDS} rounds (ours)",
        (*REPAIRED, "prune.round_to=32"),
        ROUNDS,
    ),
}
"""Title, settings, rounds without training."""
OURS_AT_ONCE = ("ours", "ours-32")

ROWS = {
    "source": Row("source, untouched", trained=False, sized=False),
    **{
        name: Row(title, overrides, from_one_shot=True, rounds=rounds, trained=False)
        for name, (title, overrides, rounds) in METHOD_ROWS.items()
    },
    **{
        f"{name}-trained": Row(f"{title}, then training", overrides, from_one_shot=True, rounds=rounds)
        for name, (title, overrides, rounds) in METHOD_ROWS.items()
        if name not in OURS_AT_ONCE
    },
    "sheared-trained": Row("Sheared-LLaMA, masks while training", ("prune.method=sheared",)),
    "ours-trained": Row("global mixture, group saliency, while training (ours)", GROUP),
    "ours-kept-trained": Row(
        "global mixture, group saliency, while training, hidden size kept (ours)", (*GROUP, "prune.groups=attn,ffn")
    ),
    "ours-zscore-while-trained": Row(
        "global mixture, z-scores of output energy, while training (ours)",
        (*GLOBAL, *ZSCORE, "prune.horizon=0.1"),
    ),
    "ours-rounds-trained": Row(f"{METHOD_ROWS['ours'][0]}, then training", REPAIRED, from_one_shot=True, rounds=ROUNDS),
    "ours-32-trained": Row(
        "global mixture, group saliency, while training, in multiples of 32 (ours)", (*GROUP, "prune.round_to=32")
    ),
}
_TRAINED = [f"{name}-trained+kd" for name in (*METHOD_ROWS, "sheared", "ours-kept", "ours-rounds", "ours-zscore-while")]
GROUPS = {
    "pruned": ["source", *METHOD_ROWS],
    "trained": _TRAINED,
    "all": ["source", *METHOD_ROWS, *_TRAINED],
}

if __name__ == "__main__":
    run_study("peers", __doc__, ROWS, GROUPS)
