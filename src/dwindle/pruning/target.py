"""Targets: sizes (``core.sizes``) resolved for one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.sizes import format_bytes, format_count, parse_size


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that are equal in all layers."""

    hidden: int
    heads: int
    ffn: int
    layers: int

    @classmethod
    def of(cls, structure: Structure) -> Shape:
        """The shape of a structure; where layers differ, the smallest sizes. Absent blocks do not count."""
        return cls(
            len(structure.hidden),
            min((len(la.query_heads) for la in structure.layers if la.query_heads), default=0),
            min((len(la.ffn) for la in structure.layers if "mlp" not in la.absent), default=0),
            len(structure.places),
        )

    def changed(self, source: Structure) -> list[str]:
        """The sizes that differ from the source's; the others stay as they are, also where layers differ."""
        own, wanted = asdict(Shape.of(source)), asdict(self)
        return [key for key in wanted if wanted[key] != own[key]]

    def is_reached(self, alive: Structure, source: Structure) -> bool:
        """Whether a structure has these sizes; of those that stay, the smallest layer may be gone."""
        now, wanted, changed = asdict(Shape.of(alive)), asdict(self), self.changed(source)
        return all(now[key] == size if key in changed else now[key] >= size for key, size in wanted.items())


Sizes = dict[str, int | list[int]]


def sizes_of(structure: Structure) -> Sizes:
    """Hidden size, heads and FFN width, the smallest and the largest where layers differ; layers, if some were
    removed."""
    heads = [len(la.query_heads) for la in structure.layers if la.query_heads] or [0]
    widths = [len(la.ffn) for la in structure.layers if "mlp" not in la.absent]
    spans = {"heads": heads, "ffn": widths}
    own = {name: min(of) if min(of) == max(of) else [min(of), max(of)] for name, of in spans.items()}
    layers = len(structure.places)
    return {"hidden": len(structure.hidden), **own} | ({"layers": layers} if layers < len(structure.layers) else {})


def sizes_text(sizes: Sizes) -> str:
    """Sizes as text: ``hidden 576, heads 6 to 9, ffn 716``."""
    spans = {name: " to ".join(map(str, size)) if isinstance(size, list) else str(size) for name, size in sizes.items()}
    return ", ".join(f"{name} {span}" for name, span in spans.items())


@dataclass(frozen=True, slots=True)
class FileLimit:
    """The largest file that a model may be exported to."""

    max_bytes: int
    type: str
    bytes_of: Callable[[Structure], int]
    """Size of the file of a model with this structure."""
    bytes_per_parameter: float
    """Bytes per parameter of the FFN or of the hidden channels, whichever is more."""


@dataclass(frozen=True, slots=True)
class Target:
    """At most ``num_parameters``; with ``shape``, exactly those sizes; with ``file``, a file of at most its size."""

    num_parameters: int
    """With ``file`` an estimate."""
    shape: Shape | None = None
    file: FileLimit | None = None


def is_share(text: str) -> bool:
    """Whether a size is relative to the source: ``0.6``, ``60%``, ``50%nonemb``."""
    return parse_size(text, "at").kind in ("share", "nonemb share")


_PERHAPS_PERCENT = 100
"""No model has so few parameters: a percent sign was forgotten."""

FileSizes = Callable[[str], Callable[[Structure], int]]
"""The sizes of files of a type, by structure; export is a later room, so its callers bring them."""


def parse_target(text: str, anatomy: Anatomy, option: str = "--to", files: FileSizes | None = None) -> Target:
    """The target of a size such as ``100M`` or ``60%`` for a model; percentages are of what is kept."""
    size, count = parse_size(text, option), anatomy.count(anatomy.source)
    if size.kind == "file":
        if files is None:
            raise UserError(f"{option} {text.strip()}: a file's size cannot be given here: give a size such as 60%")
        return _file_target(int(size.value), size.file_type, files(size.file_type), anatomy, f"{option} {text.strip()}")
    if size.kind == "shape":
        return _shape_target(size.shape, anatomy, f"{option} {text.strip()}")
    wanted = size.value
    if size.kind == "share":
        wanted *= count.total
    elif size.kind == "nonemb share":
        wanted = count.embedding + size.value * count.non_embedding
    if size.kind == "count" and wanted < _PERHAPS_PERCENT:
        raise UserError(f"{option} {text.strip()}: is {wanted:,.0f} parameters: for a share write {wanted:.0f}%")
    if wanted >= count.total:
        raise UserError(
            f"{option} {text.strip()}: the source has {count.total:,} parameters ({format_count(count.total)}), so "
            "nothing would be removed: choose a target below it"
        )
    return Target(int(wanted))


def _file_target(
    max_bytes: int, type_: str, bytes_of: Callable[[Structure], int], anatomy: Anatomy, given: str
) -> Target:
    """The parameters are estimated, for widths like the source's and in whole blocks: the larger number counts."""
    source = anatomy.source
    now = bytes_of(source)
    if now <= max_bytes:
        raise UserError(
            f"{given}: the source's file has {format_bytes(now)} already, so nothing would be removed: choose less"
        )
    estimate, rate = _estimate(source, max_bytes, bytes_of, anatomy)
    wanted = max(estimate, _estimate(_in_blocks(source), max_bytes, bytes_of, anatomy)[0], 1)
    return Target(wanted, file=FileLimit(max_bytes, type_, bytes_of, rate))


def _estimate(
    base: Structure, max_bytes: int, bytes_of: Callable[[Structure], int], anatomy: Anatomy
) -> tuple[int, float]:
    """Parameters of a smaller ``base`` whose file fits, and bytes per parameter.

    Measured with half of its FFN channels removed, or half of its hidden channels if those need more: types with few
    bits store the embedding with more.
    """
    narrow = replace(base, layers=tuple(replace(la, ffn=la.ffn[: _half(len(la.ffn))]) for la in base.layers))
    thin = replace(base, hidden=base.hidden[: _half(len(base.hidden))])
    now, count = bytes_of(base), anatomy.count(base).total
    fewer = {half: count - anatomy.count(half).total for half in (narrow, thin)}
    rates = [(now - bytes_of(half)) / number for half, number in fewer.items() if number]
    rate = max(rates) if max(rates) > 0 else now / count
    return int(count - max(now - max_bytes, 0) / rate), rate


def _in_blocks(source: Structure) -> Structure:
    """The largest structure whose widths are whole blocks of 256, in which K types need the fewest bytes."""

    def cut(indices: tuple[int, ...]) -> tuple[int, ...]:
        return indices[: len(indices) // 256 * 256 or len(indices)]

    layers = tuple(replace(layer, ffn=cut(layer.ffn)) for layer in source.layers)
    return Structure(cut(source.hidden), layers)


def _half(width: int) -> int:
    """About half, in whole blocks if possible."""
    block = next((block for block in (256, 32) if width // 2 >= block), 1)
    return width // 2 // block * block


def _shape_target(sizes: dict[str, int], anatomy: Anatomy, given: str) -> Target:
    source, spans = Shape.of(anatomy.source), sizes_of(anatomy.source)
    for key, size in sizes.items():
        own, span = getattr(source, key), spans.get(key)
        if isinstance(span, list) and sizes.get("layers", source.layers) < source.layers:
            raise UserError(f"{given}: the source's layers differ in {key}: give layers alone, or a size such as 60%")
        if isinstance(span, list) and size != own:  # the same group is removed from every layer, so they stay different
            raise UserError(f"{given}: the source's layers have {sizes_text({key: span})}: give a size such as 60%")
        if size > own:
            raise UserError(f"{given}: {key} must lie between 1 and the source's {own}")
    shape = replace(source, **sizes)
    if shape == source:
        raise UserError(f"{given}: these are the source's own sizes: choose a smaller one")
    return Target(0, shape)
