"""Writes a model as an ONNX graph of basic operators, with the key/value cache as inputs and outputs.

The graph is built operator by operator, not traced: it does not depend on the versions of torch and transformers, batch
and length are dynamic, and unequal layers or irregular key/value heads need no special case. Input and output names are
those of Optimum (``past_key_values.0.key``, ``present.0.key``).

Axes: B batch, S new tokens, P cached tokens, T = P + S, H query heads, K key/value heads, G = H/K, D head size.
"""

from __future__ import annotations

import math
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.anatomy.positions import follows_length
from dwindle.anatomy.refusals import split_name
from dwindle.anatomy.structure import Layer
from dwindle.core.errors import UserError, install_hint
from dwindle.core.progress import track

OPSET = 18
BLOCK = 32
"""Columns that share a scale in the graphs of 8 and 4 bits."""
Stored = dict[str, torch.Tensor]
_MICROSOFT = "com.microsoft"
_IR_VERSION = 10
_MASKED = float(np.finfo(np.float32).min)
_STEM = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_LAYER_PART = re.compile(
    r"self_attn\.((q|k|v|o|qkv)_proj\.(weight|bias)|(q|k)_norm\.weight|(query|key)_layernorm\.weight)"
    r"|mlp\.(gate|up|gate_up|down)_proj\.(weight|bias)"
)
_ACTIVATIONS = ("silu", "swish", "relu2", "gelu_pytorch_tanh")


def import_onnx() -> Any:
    try:
        import_module("onnxruntime")  # the export is verified with it
        return import_module("onnx")
    except ImportError as error:
        raise UserError(f"--to onnx needs onnx and onnxruntime: {install_hint('onnx')}") from error


def write_onnx(model: Any, path: Path, *, bits: int | None = None, weights_in: str | None = None) -> Stored:
    """Write the graph to ``path``; returns the weights that ``bits`` (8 or 4) rounded, by name.

    The weights go into the file ``weights_in`` beside it, which avoids the 2 GB limit; None: into the same file.
    """
    onnx = import_onnx()
    decoder = _Decoder(onnx, model, bits)
    proto = decoder.build()
    if weights_in is None:
        onnx.save_model(proto, str(path))
    else:
        onnx.save_model(proto, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=weights_in)
    onnx.checker.check_model(str(path))
    return decoder.stored


class SmallMatrix(NamedTuple):
    """Names of the values and scales of a matrix of few bits, in the layout of onnxruntime's MatMulNBits."""

    values: str
    scales: str
    rows: int
    columns: int
    bits: int


def rounded_blocks(rows_OI: npt.NDArray[np.float32], bits: int) -> tuple[npt.NDArray[Any], ...]:
    """A matrix in blocks of 32 columns: packed integers [O, blocks, bytes], scales [O, blocks], and what they mean.

    w ≈ scale · (q - 2^(bits-1)). With 4 bits the value of largest magnitude is exactly -8 scales, as in GGUF's q4_0.
    """
    rows, columns = rows_OI.shape
    num_blocks, middle = -(-columns // BLOCK), 2 ** (bits - 1)
    blocks = np.zeros((rows, num_blocks * BLOCK), np.float32)
    blocks[:, :columns] = rows_OI
    blocks = blocks.reshape(rows, num_blocks, BLOCK)
    if bits == 8:
        scales = np.abs(blocks).max(-1) / (middle - 1)
    else:
        scales = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0] / -middle
    divisor = np.where(scales == 0, 1, scales)[..., None]
    whole = np.clip(np.rint(blocks / divisor) + middle, 0, 2 * middle - 1)
    back = ((whole - middle) * scales[..., None]).reshape(rows, -1)[:, :columns].astype(np.float32)
    packed = whole.astype(np.uint8)
    if bits == 4:
        packed = packed[..., 0::2] | (packed[..., 1::2] << 4)
    return packed, scales.astype(np.float32), np.ascontiguousarray(back)


class _Graph:
    """Collects nodes and constants; the methods return names of values."""

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._small: dict[tuple[str, bytes, tuple[int, ...]], str] = {}

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, num_outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        names = [f"{kind.lower()}_{len(self.nodes)}_{place}" for place in range(num_outputs)]
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def named(self, kind: str, output: str, *inputs: str, **attributes: Any) -> None:
        """Add a node whose result is the graph output ``output``."""
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [output], **attributes))

    def weight(self, name: str, values: npt.NDArray[Any]) -> str:
        self.constants.append(self.onnx.numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def constant(self, values: Any, dtype: Any) -> str:
        """A small constant; equal constants are stored once."""
        array = np.asarray(values, dtype)
        key = (str(array.dtype), array.tobytes(), array.shape)
        if key not in self._small:
            self._small[key] = self.weight(f"constant_{len(self._small)}", array)
        return self._small[key]

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def number(self, value: float) -> str:
        return self.constant(value, np.float32)

    def reshape(self, value: str, *shape: int) -> str:
        """0 keeps an axis, -1 infers its size."""
        return self.op("Reshape", value, self.ints(*shape))

    def unsqueeze(self, value: str, *axes: int) -> str:
        return self.op("Unsqueeze", value, self.ints(*axes))

    def scaled(self, value: str, factor: float) -> str:
        return value if factor == 1.0 else self.op("Mul", value, self.number(factor))


class _Decoder:
    """Builds the graph of one model."""

    def __init__(self, onnx: Any, model: Any, bits: int | None = None) -> None:
        self.onnx = onnx
        self.bits = bits
        """Bits of the layers' weights; if set, embedding and head have 8."""
        self.stored: Stored = {}
        self.graph = _Graph(onnx)
        self.model = model
        self.config = model.config
        self.anatomy = Anatomy.of(model)
        self.tensors = {name: p.detach() for name, p in model.named_parameters()}
        self.small: dict[str, SmallMatrix] = {}
        self.masks: dict[int | None, str] = {}
        self.rotations: dict[str, tuple[str, str]] = {}
        if (why := unsupported(model)) is not None:
            raise UserError(f"--to onnx: {why}: export to hf instead")

    def build(self) -> Any:
        g = self.graph
        x, embedding = self._embedded()
        x = g.scaled(x, float(getattr(self.config, "embedding_multiplier", 1.0)))
        x = g.scaled(x, float(getattr(self.model.model.embed_tokens, "scalar_embed_scale", 1.0)))
        self.positions = g.unsqueeze(g.op("Cast", "position_ids", to=self.onnx.TensorProto.FLOAT), -1)
        layers = self.anatomy.source.layers
        for number, layer in enumerate(track(layers, "writing the graph", len(layers))):
            x = self._layer(x, number, layer)
        x = self._norm(x, "model.norm.weight", self.config.rms_norm_eps)
        self._head(x, embedding)
        return self._proto(layers)

    def _layer(self, x: str, number: int, layer: Layer) -> str:
        """One decoder layer; norms come before the two blocks, after them, or both."""
        prefix, family = f"model.layers.{number}.", self.anatomy.family
        eps = self.config.rms_norm_eps
        factor = float(getattr(self.config, "residual_multiplier", 1.0))
        for name, block in (("self_attn", self._attention), ("mlp", self._ffn)):
            if family.blocks.get(name) in layer.absent:
                continue
            before, after = family.norm_before.get(name), family.norm_after.get(name)
            inside = x if before is None else self._norm(x, f"{prefix}{before}.weight", eps)
            inside = block(inside, number, layer)
            inside = inside if after is None else self._norm(inside, f"{prefix}{after}.weight", eps)
            x = self.graph.op("Add", x, self.graph.scaled(inside, factor))
        return x

    def _attention(self, x: str, number: int, layer: Layer) -> str:
        g, dim = self.graph, self.anatomy.head_dim
        module = self.model.model.layers[number].self_attn
        num_q, num_kv = len(layer.query_heads), len(layer.kv_heads)
        query, key, value = self._projections(x, number, num_q, num_kv)
        query, key, value = (g.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, key, value))
        if self._rotates(module, number):
            query, key = self._rotated(query, number), self._rotated(key, number)
        if f"model.layers.{number}.self_attn.query_layernorm.weight" in self.tensors:  # Hunyuan
            query, key = (
                self._norm(part, f"model.layers.{number}.self_attn.{name}_layernorm.weight", self.config.rms_norm_eps)
                for name, part in (("query", query), ("key", key))
            )
        if self.config.rope_parameters.get("llama_4_scaling_beta"):
            query = g.op("Mul", query, self._late_scale())
        past = f"past_key_values.{number}"
        g.named("Concat", f"present.{number}.key", f"{past}.key", key, axis=2)
        g.named("Concat", f"present.{number}.value", f"{past}.value", value, axis=2)
        key, value = f"present.{number}.key", f"present.{number}.value"
        if layer.is_regular:
            query = g.reshape(query, 0, num_kv, num_q // num_kv, -1, dim)
        else:
            owners = {kv: place for place, kv in enumerate(layer.kv_heads)}
            which = g.ints(*(owners[kv] for kv in layer.kv_of_query))
            key, value = (g.op("Gather", part, which, axis=1) for part in (key, value))
            query = g.unsqueeze(query, 2)
        key, value = g.unsqueeze(g.op("Transpose", key, perm=[0, 1, 3, 2]), 2), g.unsqueeze(value, 2)
        scores = g.scaled(g.op("MatMul", query, key), float(module.scaling))
        scores = g.op("Add", scores, self._mask(self._window(number)))
        attended = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
        attended = g.op("Transpose", g.reshape(attended, 0, num_q, -1, dim), perm=[0, 2, 1, 3])
        return self._linear(g.reshape(attended, 0, 0, num_q * dim), f"model.layers.{number}.self_attn.o_proj")

    def _projections(self, x: str, number: int, num_q: int, num_kv: int) -> tuple[str, str, str]:
        """q, k, v as [B, S, heads, D], with q/k norms if the family has them."""
        g, dim = self.graph, self.anatomy.head_dim
        prefix = f"model.layers.{number}.self_attn."
        if f"{prefix}qkv_proj.weight" in self.tensors:
            sizes = g.ints(num_q * dim, num_kv * dim, num_kv * dim)
            parts = g.ops("Split", 3, self._linear(x, f"{prefix}qkv_proj"), sizes, axis=-1)
        else:
            parts = [self._linear(x, f"{prefix}{part}_proj") for part in "qkv"]
        found = []
        for name, part, heads in zip("qkv", parts, (num_q, num_kv, num_kv), strict=True):
            gain = self.tensors.get(f"{prefix}{name}_norm.weight")
            per_head = gain is not None and len(gain) == dim
            if gain is not None and not per_head:
                part = self._norm(part, f"{prefix}{name}_norm.weight", self.config.rms_norm_eps)
            part = g.reshape(part, 0, 0, heads, dim)
            found.append(
                self._norm(part, f"{prefix}{name}_norm.weight", self.config.rms_norm_eps) if per_head else part
            )
        return found[0], found[1], found[2]

    def _ffn(self, x: str, number: int, layer: Layer) -> str:
        g, prefix = self.graph, f"model.layers.{number}.mlp."
        if f"{prefix}gate_up_proj.weight" in self.tensors:
            width = len(layer.ffn)
            gate, up = g.ops("Split", 2, self._linear(x, f"{prefix}gate_up_proj"), g.ints(width, width), axis=-1)
        elif f"{prefix}gate_proj.weight" in self.tensors:
            gate, up = self._linear(x, f"{prefix}gate_proj"), self._linear(x, f"{prefix}up_proj")
        else:
            return self._linear(self._activated(self._linear(x, f"{prefix}up_proj")), f"{prefix}down_proj")
        return self._linear(g.op("Mul", self._activated(gate), up), f"{prefix}down_proj")

    def _activated(self, x: str) -> str:
        g, kind = self.graph, _activation(self.config)
        if kind == "relu2":
            return g.op("Pow", g.op("Relu", x), g.number(2.0))
        if kind == "gelu_pytorch_tanh":
            cubed = g.scaled(g.op("Pow", x, g.number(3.0)), 0.044715)
            bent = g.op("Tanh", g.scaled(g.op("Add", x, cubed), math.sqrt(2 / math.pi)))
            return g.op("Mul", g.scaled(x, 0.5), g.op("Add", bent, g.number(1.0)))
        return g.op("Mul", x, g.op("Sigmoid", x))

    def _linear(self, x: str, module: str) -> str:
        g, weight = self.graph, f"{module}.weight"
        if self.bits is None:
            x = g.op("MatMul", x, g.weight(weight, self._rows(weight).T))
        else:
            x = self._small_product(x, self._rounded(weight, self._rows(weight), self.bits))
        if f"{module}.bias" in self.tensors:
            x = g.op("Add", x, g.weight(f"{module}.bias", self._rows(f"{module}.bias")))
        return x

    def _embedded(self) -> tuple[str, str]:
        """The residual stream [B, S, hidden], and the name of the embedding for a tied head."""
        g, name, hidden = self.graph, "model.embed_tokens.weight", int(self.config.hidden_size)
        if self.bits is None:
            embedding = g.weight(name, self._array(name))
            return g.op("Gather", embedding, "input_ids"), embedding
        table = self._rounded(name, self._array(name), 8)
        whole = g.op("Cast", g.op("Gather", table.values, "input_ids"), to=self.onnx.TensorProto.FLOAT)
        scale = g.unsqueeze(g.op("Gather", g.reshape(table.scales, table.rows, -1), "input_ids"), -1)
        x = g.reshape(g.op("Mul", g.op("Sub", whole, g.number(128.0)), scale), 0, 0, -1)
        x = g.op("Slice", x, g.ints(0), g.ints(hidden), g.ints(2))
        return x, name

    def _rounded(self, name: str, rows_OI: npt.NDArray[np.float32], bits: int) -> SmallMatrix:
        """A matrix in blocks of 32 columns, each with its scale; a tied head shares the embedding's."""
        if name in self.small:
            return self.small[name]
        packed, scales, _ = rounded_blocks(rows_OI, bits)
        self.stored[name] = torch.from_numpy(rounded_blocks(self._array(name), bits)[2])  # in the model's own order
        g = self.graph
        values, factors = g.weight(f"{name}_q{bits}", packed), g.weight(f"{name}_scales", scales.ravel())
        self.small[name] = SmallMatrix(values, factors, rows_OI.shape[0], rows_OI.shape[1], bits)
        return self.small[name]

    def _small_product(self, x: str, matrix: SmallMatrix) -> str:
        settings = {"K": matrix.columns, "N": matrix.rows, "bits": matrix.bits, "block_size": BLOCK}
        return self.graph.op("MatMulNBits", x, matrix.values, matrix.scales, domain=_MICROSOFT, **settings)

    def _rows(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor; of interleaved rotations with q and k rows in the order of the other kind, which scores
        ignore."""
        values = self._array(name)
        if not self.anatomy.family.interleaved_rotation or not name.endswith(
            (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")
        ):
            return values
        dim, rotated = self.anatomy.head_dim, 2 * len(self.model.model.rotary_emb.inv_freq)
        order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, dim)]
        return values.reshape(-1, dim, *values.shape[1:])[:, order].reshape(values.shape)

    def _norm(self, x: str, gain: str, eps: float) -> str:
        g = self.graph
        mean = g.op("ReduceMean", g.op("Pow", x, g.number(2.0)), g.ints(-1), keepdims=1)
        x = g.op("Div", x, g.op("Sqrt", g.op("Add", mean, g.number(eps))))
        return g.op("Mul", x, g.weight(gain, self._array(gain) + np.float32(self.anatomy.family.gain_offset)))

    def _rotates(self, module: Any, number: int) -> bool:
        """Whether a layer has positions: not all of SmolLM3, nor full-attention layers of an EXAONE 4 with windows."""
        if self.config.model_type.removeprefix(CUSTOM_PREFIX) == "exaone4":
            return self.config.sliding_window is None or self._window(number) is not None
        return bool(getattr(module, "use_rope", True))

    def _rotation(self, number: int) -> tuple[str, str, int]:
        """cos and sin as [B, 1, S, r/2] and r/2, once for each kind of layer that has its own."""
        g, rotary = self.graph, self.model.model.rotary_emb
        kind = f"{self.config.layer_types[number]}_" if isinstance(rotary.rope_type, dict) else ""
        frequencies = getattr(rotary, f"{kind}inv_freq").detach().float().cpu().numpy()
        if kind not in self.rotations:
            inverse = g.weight(f"{kind}rotary_frequencies", frequencies[None, None])
            angles = g.unsqueeze(g.op("Mul", self.positions, inverse), 1)
            factor = float(getattr(rotary, f"{kind}attention_scaling"))
            self.rotations[kind] = (g.scaled(g.op("Cos", angles), factor), g.scaled(g.op("Sin", angles), factor))
        return (*self.rotations[kind], len(frequencies))

    def _rotated(self, x: str, number: int) -> str:
        """RoPE: channel i is rotated with channel i + r/2, where the first r of D channels rotate."""
        g, dim = self.graph, self.anatomy.head_dim
        cos, sin, half = self._rotation(number)
        sizes = [half, half, *([dim - 2 * half] if dim > 2 * half else [])]
        first, second, *rest = g.ops("Split", len(sizes), x, g.ints(*sizes), axis=-1)
        left = g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin))
        right = g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin))
        return g.op("Concat", left, right, *rest, axis=-1)

    def _late_scale(self) -> str:
        """1 + β·log(1 + ⌊position / original length⌋) as [B, 1, S, 1]: Ministral's queries beyond that length."""
        g, rope = self.graph, self.config.rope_parameters
        spans = g.op("Floor", g.op("Div", self.positions, g.number(float(rope["original_max_position_embeddings"]))))
        grown = g.scaled(g.op("Log", g.op("Add", spans, g.number(1.0))), float(rope["llama_4_scaling_beta"]))
        return g.unsqueeze(g.op("Add", grown, g.number(1.0)), 1)

    def _window(self, number: int) -> int | None:
        """The layer's sliding window, or None."""
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        if window is None or (kinds is not None and kinds[number] != "sliding_attention"):
            return None
        return int(window)

    def _mask(self, window: int | None) -> str:
        """The additive mask [B, 1, 1, S, T]: 0 where attention is allowed, else the least float32."""
        if window in self.masks:
            return self.masks[window]
        g = self.graph
        new = g.op("Gather", g.op("Shape", "input_ids"), g.constant(1, np.int64))
        total = g.op("Gather", g.op("Shape", "attention_mask"), g.constant(1, np.int64))
        zero, one = g.constant(0, np.int64), g.constant(1, np.int64)
        keys = g.op("Range", zero, total, one)
        queries = g.unsqueeze(g.op("Range", g.op("Sub", total, new), total, one), 1)
        allowed = g.op("LessOrEqual", keys, queries)
        if window is not None:
            recent = g.op("Less", g.op("Sub", queries, keys), g.constant(window, np.int64))
            allowed = g.op("And", allowed, recent)
        present = g.op("Cast", "attention_mask", to=self.onnx.TensorProto.BOOL)
        allowed = g.op("And", allowed, g.unsqueeze(present, 1, 2, 3))
        self.masks[window] = g.op("Where", allowed, g.number(0.0), g.number(_MASKED))
        return self.masks[window]

    def _head(self, x: str, embedding: str) -> None:
        """The logits; Gemm with transB reads the matrix as stored, so that a tied head reuses the embedding."""
        g = self.graph
        untied = "lm_head.weight" in self.tensors
        x = g.reshape(x, -1, self.config.hidden_size)
        if self.bits is None:
            head = g.weight("lm_head.weight", self._array("lm_head.weight")) if untied else embedding
            flat = g.op("Gemm", x, head, transB=1)
        else:
            name = "lm_head.weight" if untied else embedding
            flat = self._small_product(x, self._rounded(name, self._array(name), 8))
        flat = g.scaled(flat, 1.0 / float(getattr(self.config, "logits_scaling", 1.0)))
        shape = g.op("Concat", g.op("Shape", "input_ids"), g.ints(self.config.vocab_size), axis=0)
        g.named("Reshape", "logits", flat, shape)

    def _proto(self, layers: tuple[Layer, ...]) -> Any:
        helper, kinds = self.onnx.helper, self.onnx.TensorProto
        dim = self.anatomy.head_dim
        inputs = [
            helper.make_tensor_value_info("input_ids", kinds.INT64, ["batch", "sequence"]),
            helper.make_tensor_value_info("attention_mask", kinds.INT64, ["batch", "total"]),
            helper.make_tensor_value_info("position_ids", kinds.INT64, ["batch", "sequence"]),
        ]
        outputs = [helper.make_tensor_value_info("logits", kinds.FLOAT, ["batch", "sequence", self.config.vocab_size])]
        for number, layer in enumerate(layers):
            for part in ("key", "value") if layer.kv_heads else ():
                heads = len(layer.kv_heads)
                past, present = ["batch", heads, "past", dim], ["batch", heads, "total", dim]
                inputs.append(helper.make_tensor_value_info(f"past_key_values.{number}.{part}", kinds.FLOAT, past))
                outputs.append(helper.make_tensor_value_info(f"present.{number}.{part}", kinds.FLOAT, present))
        graph = helper.make_graph(self.graph.nodes, "dwindle", inputs, outputs, self.graph.constants)
        opsets = [helper.make_opsetid("", OPSET), *([helper.make_opsetid(_MICROSOFT, 1)] if self.bits else [])]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="dwindle")

    def _array(self, name: str) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = self.tensors[name].to(torch.float32).cpu().numpy()
        return values


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu"))


def unsupported(model: Any) -> str | None:
    """What the graph does not compute of this model; None if it computes all."""
    family = Anatomy.of(model).family
    norms = {f"{norm}.weight" for norm in (*family.norm_before.values(), *family.norm_after.values())}
    for name, _ in model.named_parameters():
        in_layer, part = split_name(name)
        if part not in _STEM and not (in_layer and (part in norms or _LAYER_PART.fullmatch(part))):
            return f"{part} of {model.config.model_type.removeprefix(CUSTOM_PREFIX)} is not part of its graphs"
    if getattr(model.model, "rotary_emb", None) is None:
        return "a model without rotary positions is not supported"
    if kind := follows_length(model):
        return f"rope scaling {kind!r} depends on the length"
    if (activation := _activation(model.config)) not in _ACTIVATIONS:
        return f"the activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}"
    return None
