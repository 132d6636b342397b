"""The pruning methods, one row each: what decides, how it is shared out over layers, what is repaired, what it cannot.

``prune.method``, its ``--help``, the page docs/methods.md and the checks of settings are views of ``METHODS``. A new
method is a row here, a name in ``MethodName`` and a strategy (``strategies/__init__.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dwindle.anatomy.structure import KINDS, Kind

MethodName = Literal[
    "efficientllm", "adapt", "uniform", "wanda-sp", "flap", "llm-pruner", "minitron", "shortgpt", "slicegpt", "sheared"
]

_LAYERS: tuple[Kind, ...] = ("attn", "ffn")
_SCORED = ("metric", "second_order", "damping", "gram_tokens", "smoothing", "fisher")
_IN_LAYERS = ("min_heads", "min_ffn")
_WIDTHS = (*_IN_LAYERS, "min_hidden", "round_to")


@dataclass(frozen=True, slots=True)
class Method:
    """One way to choose what is pruned. Formulas: x is an input of ``o`` or ``down``, W its weights."""

    paper: str
    score: str
    """What a head or a channel is worth."""
    shares: str
    """How the removals are shared out over layers and kinds."""
    repairs: str
    """What is updated in the weights that stay."""
    cannot: str
    """What the method does not do."""
    card: str
    """The rule, as model cards state it."""
    clause: str
    """What it is, in a few words, for ``--help``."""
    kinds: tuple[Kind, ...] = _LAYERS
    default_metric: str | None = None
    """The metric if none is set; None: the method has a score of its own, and no metric is chosen."""
    settings: tuple[str, ...] = ()
    """The settings that it uses, of those that not all methods use."""
    in_training: bool = False
    """Whether it can prune during training; the others prune once, and their result is trained afterwards."""
    without_training: bool = True
    """Whether it can prune after calibration alone (``dwindle prune``)."""
    output_bias: bool = False
    """Whether its repair needs a bias on ``o`` and ``down``."""

    @property
    def when(self) -> str:
        """When it can prune, in words."""
        times = [time for time, can in (("before", self.without_training), ("during", self.in_training)) if can]
        return f"{' or '.join(times)} training"


METHODS: dict[MethodName, Method] = {
    "efficientllm": Method(
        "EfficientLLM",
        "any metric, on `o` and `down`",
        "minimal groups one by one, coupled over all layers or from any layer (selection)",
        "second_order: kept columns",
        "a shape as target needs coupled groups",
        "",
        "least salient groups one by one",
        kinds=KINDS,
        default_metric="taylor",
        settings=(*_SCORED, *_WIDTHS, "selection", "compare", "attention", "rounds"),
        in_training=True,
    ),
    "adapt": Method(
        "Adapt-Pruner",
        "any metric, on `o` and `down`",
        "layers that change the residual stream more lose less",
        "second_order: kept columns",
        "keeps the hidden size; layers differ, so the result is not stock",
        "more from layers that change the residual stream less (Adapt-Pruner)",
        "less important layers lose more",
        default_metric="taylor1",
        settings=(*_SCORED, *_IN_LAYERS, "amplitude", "distance", "balance", "interleaves", "attention", "rounds"),
        in_training=True,
    ),
    "uniform": Method(
        "adapt's control",
        "any metric, on `o` and `down`",
        "equal sizes of all layers",
        "second_order: kept columns",
        "keeps the hidden size",
        "the same share of every layer",
        "equal sizes of all layers",
        default_metric="taylor1",
        settings=(*_SCORED, *_IN_LAYERS, "balance", "interleaves", "attention", "rounds"),
        in_training=True,
    ),
    "wanda-sp": Method(
        "Wanda-sp (FLAP's baseline)",
        "mean |W| · ‖x‖₂",
        "the same share of heads and channels in every layer; layers in order, later ones see pruned inputs",
        "nothing",
        "keeps the hidden size; removes whole key/value heads only",
        "the same share of every layer, by weights times inputs (Wanda-sp)",
        "equal shares, by weights times inputs",
        settings=_IN_LAYERS,
    ),
    "flap": Method(
        "FLAP",
        "Var(x) · ‖W‖², squared for heads, as a z-score of its layer and kind",
        "one threshold for all layers and kinds",
        "bias of `o` and `down`: the mean of what they lose",
        "keeps the hidden size; not stock; needs a family with biases on both",
        "what varies least over the text, in any layer; biases replace its mean (FLAP)",
        "what varies least; biases replace it",
        settings=(*_IN_LAYERS, "attention"),
        output_bias=True,
    ),
    "llm-pruner": Method(
        "LLM-Pruner",
        "Σ |w·g − ½·w²·E[g²]| over every matrix that a group touches",
        "the same share of heads and channels in every layer except the first 4 and last 2 of 32",
        "nothing",
        "keeps the hidden size; spared layers stay whole, so the result is not stock",
        "the same share of every layer except the first and last ones (LLM-Pruner)",
        "equal shares, not of the first and last layers",
        settings=(*_IN_LAYERS, "attention", "rounds"),
    ),
    "minitron": Method(
        "Minitron (width)",
        "√Σ_sequences (mean |x|)²; for hidden channels of every norm's output",
        "one shape for all layers: the target's, or equal shares of hidden size, heads and FFN",
        "nothing",
        "query heads are removed inside key/value groups, which all stay",
        "what is least active, to one shape (Minitron)",
        "least active groups, to one shape",
        kinds=KINDS,
        settings=(*_WIDTHS, "rounds"),
    ),
    "shortgpt": Method(
        "ShortGPT",
        "1 − E cos(h, h') of the residual stream before and after the layer",
        "whole layers",
        "nothing",
        "removes whole layers only, so the result is up to one layer below the target",
        "the whole layers that change the residual stream least (ShortGPT)",
        "whole layers",
        kinds=("layer",),
        settings=("rounds",),
        in_training=True,
    ),
    "slicegpt": Method(
        "SliceGPT (one shared rotation)",
        "eigenvalues of E[x xᵀ], x the residual stream as the norms scale it",
        "the k principal directions of the residual stream, the same k in every layer",
        "everything is rotated; gains of norms are folded into what reads them",
        "prunes the hidden size only; unties the head from the embedding, which adds parameters; no families with "
        "norms after blocks or with convolutions; cannot be replayed",
        "the residual stream was rotated to its principal directions and the weakest were removed (SliceGPT)",
        "hidden size, by a rotation",
        kinds=("stem",),
        settings=("min_hidden", "round_to"),
    ),
    "sheared": Method(
        "Sheared-LLaMA",
        "hard-concrete masks, learned with the weights over the horizon",
        "one shape for all layers: the target's, or equal shares of hidden size, heads and FFN",
        "training",
        "needs training; query heads are removed inside key/value groups, which all stay; all layers stay; the "
        "mixture of the text does not follow the losses of its parts",
        "what learned masks closed, to one shape (Sheared-LLaMA)",
        "what learned masks close",
        kinds=KINDS,
        settings=_WIDTHS,
        in_training=True,
        without_training=False,
    ),
}

_OF_SOME = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.settings))

METHODS_OF: dict[str, tuple[MethodName, ...]] = {
    setting: tuple(name for name, method in METHODS.items() if setting in method.settings) for setting in _OF_SOME
}
"""Settings that only some methods use, with these."""


def help_text() -> str:
    """The methods, a few words on each, for ``--help`` and the reference of recipes."""
    words = [f"{name} ({one.clause})" for name, one in METHODS.items()]
    during = [name for name, one in METHODS.items() if one.in_training]
    return f"{', '.join(words)}. During training: {', '.join(during)}. See docs/methods.md."


def markdown() -> str:
    """The table of methods in the docs."""
    head = ["`method`", "from", "score", "shared out", "repairs", "cannot", "prunes"]
    rows = [
        [f"`{name}`", one.paper, one.score.replace("|", "\\|"), one.shares, one.repairs, one.cannot, one.when]
        for name, one in METHODS.items()
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])
