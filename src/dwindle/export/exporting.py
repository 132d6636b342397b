"""``export``: one call for every format. Each output is run in its runtime and compared before it is put in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.core.files import atomic_file, folder_size, refuse_file
from dwindle.core.notebook import Shown
from dwindle.core.progress import status
from dwindle.core.reading import MAX_STATE_BYTES, read_json
from dwindle.core.run_directory import LEDGER, STRUCTURE, RunDirectory, model_title
from dwindle.core.sizes import at_least, format_bytes, format_range
from dwindle.export import deci, gguf_types, gguf_writer, ollama, verification
from dwindle.export.card_running import Runtime
from dwindle.export.equivalents import in_common_terms
from dwindle.export.gguf_size import predicted_bytes
from dwindle.export.gguf_verification import check_metadata, verify_llamacpp
from dwindle.export.gguf_vocabulary import vocabulary_of
from dwindle.export.huggingface import check_output, write_model
from dwindle.export.llamacpp import require_xllamacpp
from dwindle.export.origin import origin_of
from dwindle.export.resize import Blocks, Resized, resize
from dwindle.export.running import PROMPT, ways_to_run
from dwindle.export.verification import Verified, fixed_prompts
from dwindle.pruning.ledger import Event, read_ledger, source_event
from dwindle.sources.gguf_file import import_gguf
from dwindle.sources.loading import Loaded, load, model_in

FORMATS = ("hf", "gguf", "onnx", "transformers.js", "executorch")


@dataclass(slots=True)
class Exported(Shown):
    """What was written, what padding it cost, and how closely it matches the source."""

    out: Path
    format: str
    architecture: str
    type: str
    num_bytes: int
    parameters: int
    resized: Resized | None = field(repr=False)
    verified: Verified | None
    warnings: list[str] = field(default_factory=list)
    predicted_bytes: int | None = None
    """Size of a GGUF file as a target such as ``90MB@q8_0`` computes it; None for other formats."""

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "format": self.format,
            "architecture": self.architecture,
            "type": self.type,
            "bytes": self.num_bytes,
            "predicted_bytes": self.predicted_bytes,
            "parameters": self.parameters,
            "cost": self.resized.cost() if self.resized is not None else None,
            "verified": None if self.verified is None else asdict(self.verified),
            "warnings": self.warnings,
        }

    def ways_to_run(self) -> dict[str, str]:
        """Runtimes and the command line for each."""
        layout = "deci" if self.architecture == deci.ARCHITECTURE else None
        return ways_to_run(self.out, self.format, custom_code=self.architecture.startswith("dwindle"), layout=layout)

    def render(self) -> str:
        lines = [
            f"{self.out}: {self.format} ({self.architecture}, {self.type}), {self.parameters:,} parameters, "
            f"{format_bytes(self.num_bytes)}"
        ]
        if self.resized is not None and self.resized.changed:
            lines.append(self.resized.describe())
        if self.verified is not None:
            lines.append(f"verified in {self.verified.describe()}")
        if self.predicted_bytes is not None:
            lines.append(f"predicted {self.predicted_bytes:,} bytes, written {self.num_bytes:,}")
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def export(
    source: str | PathLike[str] | Loaded,
    to: str,
    out: str | PathLike[str],
    *,
    type: str | None = None,
    stock: bool = False,
    round_to: int | None = None,
    layout: str | None = None,
    verify: bool = True,
    threads: int = 1,
    overwrite: bool = False,
) -> Exported:
    """Write a model for another runtime and verify that it computes the same.

    ``source`` may be a run of ``pretrain``: its model is exported. ``to`` is ``hf`` (a directory), ``gguf`` (a file for
    llama.cpp, with an Ollama ``Modelfile``), ``onnx`` (a directory for onnxruntime), ``transformers.js`` (a directory
    for browsers and Node) or ``executorch`` (a file for phones). ``type`` is one of ``gguf_types.TYPES`` for GGUF
    (default f16), ``f32``, ``f16`` or ``bf16`` for hf (default: as stored, or f32 if widths are padded), ``f32`` or
    ``int8`` for executorch. ``stock`` turns cluster attention and unequal layers into a stock model by exact padding;
    ``round_to`` pads hidden and FFN widths to a multiple (32 for quantized GGUF, 256 for K types). ``layout="deci"``
    writes an hf directory for servers that have native code for unequal Llama layers (``DeciLMForCausalLM``). An output
    that differs from the source is deleted and ``Mismatch`` is raised.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to!r}: give one of {', '.join(FORMATS)}")
    if round_to is not None and round_to < 1:
        raise UserError(f"--round {round_to}: give a multiple of at least 1, such as 32")
    if layout not in (None, "deci") or (layout is not None and (to != "hf" or stock)):
        raise UserError(f"--as {layout}: the layouts are deci, for --to hf without --stock")
    at_least(1, threads=threads)
    if not isinstance(source, Loaded):
        source = model_in(source)
    target = Path(out)
    kind = _chosen_type(to, type)
    _check_target(to, target, kind, verify, overwrite, _files_read(source))
    # Padding the hidden width scales the norms' gains, which 16 bits would round: then everything is float32.
    loaded = _loaded(source, as_stored=kind == "auto" and (round_to or 1) == 1)
    job = _Export(loaded, target, kind, stock, round_to or 1, verify, threads, overwrite, layout)
    jobs = (job.hf, job.gguf, job.onnx, job.javascript, job.executorch)
    with status(f"writing {target}" + (" and comparing it with its source" if verify else "")):
        return dict(zip(FORMATS, jobs, strict=True))[to]()


def _loaded(source: str | Loaded, *, as_stored: bool) -> Loaded:
    """The model in float32 unless ``as_stored``, because 16-bit arithmetic would blur the comparison."""
    if not isinstance(source, Loaded):
        return load(source, dtype="auto" if as_stored else torch.float32)
    return source if as_stored else replace(source, model=verification.as_float32(source.model))


def _chosen_type(to: str, type_: str | None) -> str:
    types = {"hf": ("auto", "f32", "f16", "bf16"), "gguf": gguf_types.TYPES, "executorch": ("f32", "int8")}
    allowed: Sequence[str] = types.get(to, ("f32",))
    chosen = type_ or {"hf": "auto", "gguf": "f16"}.get(to, "f32")
    if chosen not in allowed:
        raise UserError(f"--type {chosen!r}: for {to} give one of {', '.join(allowed)}")
    return chosen


def _files_read(source: str | Loaded) -> list[str]:
    """The paths that the export reads, which ``out`` must not overwrite."""
    place = source.source if isinstance(source, Loaded) else source
    folder = Path(place).expanduser()
    return [place, *(() if (folder / "config.json").is_file() else map(str, folder.glob("*.gguf")))]


def _check_target(to: str, target: Path, kind: str, verify: bool, overwrite: bool, sources: Sequence[str]) -> None:
    """Report a missing package or an unusable ``out`` before any work."""
    if to == "gguf":
        import_gguf("writing GGUF")
        gguf_types.check_quantizer(kind)
        if verify:
            require_xllamacpp()
        refuse_file(target, suffix=".gguf", overwrite=overwrite, sources=sources)
        if (beside := ollama.place_of(target)).exists() and not overwrite:
            raise UserError(f"--out {target}: {beside} already exists: choose another name or pass --overwrite")
    elif to == "executorch":
        from dwindle.export.executorch_program import import_executorch

        import_executorch()
        refuse_file(target, suffix=".pte", overwrite=overwrite, sources=sources)
    else:
        if to in ("onnx", "transformers.js"):
            from dwindle.export.onnx_graph import import_onnx

            import_onnx()
        check_output(target, overwrite=overwrite, sources=sources)


@dataclass(slots=True)
class _Export:
    loaded: Loaded
    target: Path
    type: str
    stock: bool
    round_to: int
    verify: bool
    threads: int
    overwrite: bool
    layout: str | None = None

    def hf(self) -> Exported:
        resized, model = self._directory_model()
        dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        reference = model
        if self.type != "auto":
            rounded = {name: p.detach().to(dtypes[self.type]) for name, p in model.named_parameters()}
            reference = verification.with_tensors(model, rounded)
            model = deepcopy(model).to(dtypes[self.type])
        verified = None
        with self._write_model(model, resized) as folder:
            if self.verify and self.layout is not None:
                verified = deci.verify(folder, reference, self._prompts())
            elif self.verify:
                verified = verification.verify_transformers(folder, reference, self._prompts(), written=model)
            size = folder_size(folder)
        stored = str(next(model.parameters()).dtype).removeprefix("torch.")
        architecture = deci.ARCHITECTURE if self.layout is not None else model.config.model_type
        return self._result("hf", model, architecture, stored, size, resized, verified)

    def gguf(self) -> Exported:
        """Unequal layers are kept (architecture ``deci``) unless ``stock`` or the family requires equal ones."""
        resized = self._resized(**gguf_writer.padding_for(self.loaded.model, stock=self.stock))
        model = in_common_terms(resized.model)
        vocabulary = vocabulary_of(self.loaded.tokenizer, model.config.vocab_size, self.loaded.source)
        gguf_writer.architecture_of(model)
        about = self._gguf_about()
        with atomic_file(self.target) as path:
            written = gguf_writer.write_gguf(path, model, vocabulary, type_=self.type, threads=self.threads, **about)
            verified, warnings = None, list[str]()
            if self.verify:
                check_metadata(path, model, self.loaded.tokenizer)
                reference = verification.with_tensors(model, written.stored) if written.stored else model
                verified, warnings = self._verified_gguf(path, reference)
            size = path.stat().st_size
            result = self._result("gguf", model, written.architecture, self.type, size, resized, verified)
            result.warnings += warnings
            result.predicted_bytes = predicted_bytes(model, vocabulary, type_=self.type, **about)
            if vocabulary.warning:
                result.warnings.append(vocabulary.warning)
            if size != result.predicted_bytes:
                result.warnings.append("the file has another size than predicted: one as a target (…MB@…) is not exact")
            if written.fallbacks:
                odd = odd_sizes(Anatomy.of(model), gguf_types.largest_block(written.fallbacks))
                result.warnings.append(gguf_types.describe_fallbacks(self.type, written.fallbacks, odd))
        generation = getattr(self.loaded.model, "generation_config", None)
        with atomic_file(ollama.place_of(self.target)) as path:
            path.write_text(ollama.modelfile(self.target.name, self.loaded.tokenizer, generation), encoding="utf-8")
        return result

    def _verified_gguf(self, path: Path, reference: Any) -> tuple[Verified, list[str]]:
        """A file that may be good is kept under another name, for the user to judge."""
        prompts, tokenizer = self._prompts(), self.loaded.tokenizer
        try:
            return verify_llamacpp(path, reference, tokenizer, prompts, type_=self.type, threads=self.threads)
        except verification.Doubtful as doubt:
            kept = self.target.with_name(f"{self.target.stem}.unverified.gguf")
            if kept.exists() and not self.overwrite:
                raise verification.Mismatch(f"{doubt}: {kept} exists already: delete it to keep such a file") from doubt
            os.replace(path, kept)
            how = f"judge it with `dwindle generate {quote(str(kept))} '{PROMPT}'`, or export without verification"
            raise verification.Mismatch(f"{doubt}: kept as {kept}: {how}") from doubt

    def onnx(self) -> Exported:
        from dwindle.export.onnx_graph import write_onnx
        from dwindle.export.onnx_verification import verify_onnx

        resized, model = self._directory_model()
        verified = None
        with self._write_model(model, resized, weights=False) as folder:
            path, written = folder / "model.onnx", in_common_terms(model)
            write_onnx(written, path, weights_in="model.onnx.data")
            if self.verify:
                verified = verify_onnx(path, written, self.loaded.model, self._prompts(), threads=self.threads)
            size = folder_size(folder)
        return self._result("onnx", model, model.config.model_type, "f32", size, resized, verified)

    def javascript(self) -> Exported:
        """The graph three times (float32, 8 bits, 4 bits) in the layout that transformers.js reads."""
        from dwindle.export.transformers_js import refuse_unknown, write_graphs

        resized, model = self._directory_model()
        refuse_unknown(model.config)
        with self._write_model(model, resized, weights=False, runtime="transformers.js") as folder:
            verified = write_graphs(model, folder, self._prompts(), threads=self.threads if self.verify else None)
            size = folder_size(folder)
        return self._result("transformers.js", model, model.config.model_type, "f32, q8, q4", size, resized, verified)

    def executorch(self) -> Exported:
        """One file; unequal layers and cluster attention are kept unless ``stock`` or ``round_to`` ask otherwise."""
        from dwindle.export.executorch_program import write_program
        from dwindle.export.executorch_runtime import verify_executorch

        resized, model = self._directory_model()
        verified = None
        with atomic_file(self.target) as path:
            reference = write_program(model, path, self.type)
            if self.verify:
                prompts, threads = self._prompts(), self.threads
                verified = verify_executorch(path, reference, prompts, type_=self.type, threads=threads)
            size = path.stat().st_size
        return self._result("executorch", model, model.config.model_type, self.type, size, resized, verified)

    def _directory_model(self) -> tuple[Resized | None, Any]:
        """The model that a directory holds, and how it was padded, if it was."""
        if self.layout is not None:
            deci.refuse_other_models(self.loaded.model)
            resized = self._resized(uniform=False, equal_queries=True)
            return resized, resized.model
        if not self.stock and self.round_to == 1:
            return None, self.loaded.model
        resized = self._resized(uniform=True)
        return resized, resized.model

    def _write_model(
        self, model: Any, resized: Resized | None, *, weights: bool = True, runtime: Runtime = "onnxruntime"
    ) -> AbstractContextManager[Path]:
        structure, ledger, source = self._history(model, resized)
        return write_model(
            model,
            self.loaded.tokenizer,
            self.target,
            structure=structure,
            source=source,
            ledger=ledger,
            recipe=self._recipe(),
            source_card=Path(self.loaded.source) / "README.md",
            quality=None if source == self.loaded.source else RunDirectory(Path(self.loaded.source)).read_quality(),
            overwrite=self.overwrite,
            weights=weights,
            layout=self.layout,
            runtime="vllm" if self.layout is not None else "transformers" if weights else runtime,
        )

    def _resized(
        self, *, uniform: bool, min_hidden: int = 1, equal_queries: bool = False, fills: Blocks = frozenset()
    ) -> Resized:
        found = resize(
            self.loaded.model,
            uniform=uniform,
            round_to=self.round_to,
            min_hidden=min_hidden,
            equal_queries=equal_queries,
            fills=fills,
        )
        if self.verify and found.changed:
            verification.verify_resized(found.model, self.loaded.model, self._prompts())
        return found

    def _prompts(self) -> list[list[int]]:
        return fixed_prompts(self.loaded.tokenizer, self.loaded.model.config)

    def _history(self, model: Any, resized: Resized | None) -> tuple[Structure, list[Event], str]:
        """Structure, ledger and source name: those of the source directory, or new ones for a padded model."""
        anatomy = Anatomy.of(model)
        folder = Path(self.loaded.source)
        files = (folder / STRUCTURE, folder / LEDGER)
        if (resized is None or not resized.changed) and all(file.is_file() for file in files):
            found = read_json(files[0], limit=MAX_STATE_BYTES)
            return Structure.from_json(found, str(files[0])), read_ledger(files[1]), str(found["source"])
        settings = {"made_stock": resized.cost()} if resized is not None and resized.changed else {}
        event = source_event(self.loaded.source, anatomy, settings)
        return anatomy.source, [event], self.loaded.source

    def _gguf_about(self) -> dict[str, str]:
        """Name, description and licence for the metadata: a GGUF file has no card."""
        place = Path(self.loaded.source)
        _, ledger, source = self._history(self.loaded.model, None)
        origin, before = origin_of(source, place / "README.md"), ledger[0].get("parameters")
        text = f"{origin.hub_id or origin.name}, written by dwindle for llama.cpp and what is built on it."
        if len(ledger) > 1 and isinstance(before, int):
            text = f"{text[:-1]}: pruned from {before:,} to {ledger[-1].get('parameters', before):,} parameters."
        name = model_title(place) if place.is_dir() else place.stem or "dwindle"
        return {"name": name, "description": text, "licence": origin.licence or ""}

    def _recipe(self) -> str | None:
        """The recipe of the run that the model belongs to, for the model card."""
        run = RunDirectory.of_model(Path(self.loaded.source))
        return None if run is None else run.recipe.read_text(encoding="utf-8", errors="replace")

    def _result(
        self, to: str, model: Any, architecture: str, type_: str, size: int, resized: Resized | None, verified: Any
    ) -> Exported:
        count = sum(p.numel() for p in model.parameters())
        return Exported(self.target, to, architecture, type_, size, count, resized, verified)


def odd_sizes(anatomy: Anatomy, block: int = gguf_types.BLOCK) -> list[str]:
    """Row lengths that are not multiples of the block size, as text: ``hidden 31``, ``FFN 68 in all layers``."""
    structure = anatomy.source
    widths = [len(layer.ffn) for layer in structure.layers if layer.ffn]
    odd = [width for width in widths if width % block]
    found = [f"hidden {len(structure.hidden)}"] if len(structure.hidden) % block else []
    if odd:
        layers = "all layers" if len(odd) == len(widths) else f"{len(odd)} of {len(widths)} layers"
        found.append(f"FFN {format_range(odd)} in {layers}")
    heads = {len(layer.query_heads) for layer in structure.layers}
    if uneven := sorted(n for n in heads if n * anatomy.head_dim % block):
        found.append(f"heads {format_range(uneven)} of size {anatomy.head_dim}")
    return found
