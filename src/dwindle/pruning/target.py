"""How small: ``100M``, ``0.6``, ``60%``, ``50%nonemb`` or ``hidden=512,heads=8,ffn=1280``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dwindle.anatomy import Anatomy, Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_count, parse_count
from dwindle.recipe.checks import SHAPE_KEYS

_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%\s*(nonemb)?")
_FRACTION = re.compile(r"\d*\.\d+|\d+\.")
_FORMS = "it as 100M, 0.6, 60%, 50%nonemb or hidden=512,heads=8,ffn=1280"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that every layer shares."""

    hidden: int
    heads: int
    ffn: int

    @classmethod
    def of(cls, structure: Structure) -> Shape:
        """Of a non-uniform structure: the smallest of each."""
        return cls(
            len(structure.hidden),
            min(len(la.query_heads) for la in structure.layers),
            min(len(la.ffn) for la in structure.layers),
        )


Sizes = dict[str, int | list[int]]


def sizes_of(structure: Structure) -> Sizes:
    """Hidden size, heads and FFN width; the smallest and the largest where layers differ."""
    heads = [len(la.query_heads) for la in structure.layers]
    widths = [len(la.ffn) for la in structure.layers]
    spans = {"heads": heads, "ffn": widths}
    own = {name: min(of) if min(of) == max(of) else [min(of), max(of)] for name, of in spans.items()}
    return {"hidden": len(structure.hidden), **own}


def sizes_text(sizes: Sizes) -> str:
    """For people: ``hidden 576, heads 6 to 9, ffn 716``."""
    spans = {name: " to ".join(map(str, size)) if isinstance(size, list) else str(size) for name, size in sizes.items()}
    return ", ".join(f"{name} {span}" for name, span in spans.items())


@dataclass(frozen=True, slots=True)
class Target:
    """At most ``num_parameters``; with ``shape``, exactly those sizes."""

    num_parameters: int
    shape: Shape | None = None


def is_share(text: str) -> bool:
    """Whether a size is a share of the source: ``0.6``, ``60%``, ``50%nonemb``."""
    return any(form.fullmatch(text.strip()) for form in (_SHARE, _FRACTION))


def parse_target(text: str, anatomy: Anatomy, option: str = "--to") -> Target:
    """A target for a model; shares are of what is kept, of all parameters or of those outside the embeddings."""
    text = text.strip()
    count = anatomy.count(anatomy.source)
    if "=" in text:
        return _parse_shape(text, anatomy, option)
    share = _SHARE.fullmatch(text)
    if share is not None:
        kept = float(share[1]) / 100
        wanted = count.embedding + kept * count.non_embedding if share[2] else kept * count.total
    elif _FRACTION.fullmatch(text):
        wanted = float(text) * count.total
    else:
        try:
            wanted = parse_count(text, option)
        except UserError:
            raise UserError(f"{option} {text}: is no size: write {_FORMS}") from None
    if wanted >= count.total:
        raise UserError(
            f"{option} {text}: the source has {count.total:,} parameters ({format_count(count.total)}), so nothing "
            "would be removed: choose a target below it"
        )
    return Target(int(wanted))


def _parse_shape(text: str, anatomy: Anatomy, option: str) -> Target:
    source = Shape.of(anatomy.source)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in SHAPE_KEYS or not value.isdigit():
            raise UserError(f"{option} {text}: {part.strip()!r} is not hidden=N, heads=N or ffn=N")
        if key in sizes:
            raise UserError(f"{option} {text}: {key} is given twice")
        sizes[key] = int(value)
        if not 0 < sizes[key] <= getattr(source, key):
            raise UserError(f"{option} {text}: {key} must lie between 1 and the source's {getattr(source, key)}")
    shape = replace(source, **sizes)
    if shape == source:
        raise UserError(f"{option} {text}: these are the source's own sizes: choose a smaller one")
    return Target(0, shape)
