"""The llama2.c formats: the original one without a magic number and version 1 ("ak42"), both float32.

File layout and tokenizer behaviour follow karpathy/llama2.c (``export.py``, ``run.c``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedTokenizerBase

from dwindle.core.errors import UserError
from dwindle.core.limits import check_sizes
from dwindle.sources.built_tokenizers import finish, sentencepiece
from dwindle.sources.common import interleaved_to_halves

_MAGIC = 0x616B3432
_LEGACY_HEADER_BYTES = 7 * 4
_VERSION1_HEADER_BYTES = 256
_UNK, _BOS, _EOS = "<unk>", "<s>", "</s>"
_SPECIAL_IDS = {0: _UNK, 1: _BOS, 2: _EOS}


@dataclass(frozen=True, slots=True)
class Llama2cHeader:
    """The seven numbers of a llama2.c file, and the layout of its weights."""

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_seq_len: int
    shared_classifier: bool
    version: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def layout(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every block of the file, in order; the first axis of layer blocks is the layer."""
        layers, dim, ffn = self.num_layers, self.dim, self.hidden_dim
        kv_dim = self.head_dim * self.num_kv_heads
        embedding = ("embed", (self.vocab_size, dim))
        norms = [("attn_norm", (layers, dim)), ("ffn_norm", (layers, dim)), ("norm", (dim,))]
        attention = [
            ("q", (layers, dim, dim)),
            ("k", (layers, kv_dim, dim)),
            ("v", (layers, kv_dim, dim)),
            ("o", (layers, dim, dim)),
        ]
        # w1, w2, w3 of llama2.c are gate, down, up
        feed_forward = [("gate", (layers, ffn, dim)), ("down", (layers, dim, ffn)), ("up", (layers, ffn, dim))]
        if self.version == 1:
            yield from [*norms, embedding, *attention, *feed_forward]
        else:
            yield from [embedding, norms[0], *attention, norms[1], *feed_forward, norms[2]]
            yield "rotary_tables", (2, self.max_seq_len, self.head_dim // 2)
        if not self.shared_classifier:
            yield "lm_head", (self.vocab_size, dim)

    @property
    def data_offset(self) -> int:
        return _VERSION1_HEADER_BYTES if self.version == 1 else _LEGACY_HEADER_BYTES

    def config(self) -> LlamaConfig:
        """The transformers configuration."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.dim,
            intermediate_size=self.hidden_dim,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.max_seq_len,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=self.shared_classifier,
            bos_token_id=1,
            eos_token_id=2,
        )


def read_header(path: Path) -> Llama2cHeader:
    """Parse the header and check it against the size of the file, because the legacy format has no magic number."""
    with path.open("rb") as handle:
        start = handle.read(64)
    if start[:2] == b"PK" or start[:1] == b"\x80":
        raise UserError(
            f"source {path}: is a PyTorch pickle, not a llama2.c file: give the directory with it and config.json"
        )
    if len(start) < _LEGACY_HEADER_BYTES + 1:
        raise _not_llama2c(path, "it is too short")
    (magic,) = struct.unpack_from("<I", start)
    if magic == _MAGIC:
        (version,) = struct.unpack_from("<i", start, 4)
        if version != 1 or len(start) < 37:
            raise UserError(f"source {path}: llama2.c version {version} (quantised) is not supported: export version 1")
        numbers, shared = struct.unpack_from("<7i", start, 8), start[36] == 1
    else:
        version, numbers = 0, struct.unpack_from("<7i", start)
        shared = numbers[5] > 0
        numbers = (*numbers[:5], abs(numbers[5]), numbers[6])
    _check_numbers(path, numbers)
    dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab_size, max_seq_len = numbers
    header = Llama2cHeader(
        dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab_size, max_seq_len, shared, version
    )
    expected = header.data_offset + 4 * sum(int(np.prod(shape, dtype=object)) for _, shape in header.layout())
    actual = path.stat().st_size
    if actual != expected:
        raise _not_llama2c(path, f"its header implies {expected} bytes and it has {actual}")
    return header


def _check_numbers(path: Path, numbers: tuple[int, ...]) -> None:
    dim, _, _, num_heads, num_kv_heads, *_ = numbers
    if any(not 0 < number < 2**24 for number in numbers):
        raise _not_llama2c(path, "its header has impossible sizes")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    check_sizes(dict(zip(names, numbers, strict=False)), str(path))
    if dim % num_heads or num_heads % num_kv_heads or (dim // num_heads) % 2:
        raise _not_llama2c(path, f"{dim} channels do not divide into {num_heads} / {num_kv_heads} heads")


def _not_llama2c(path: Path, reason: str) -> UserError:
    return UserError(f"source {path}: is not a complete llama2.c file ({reason}): fetch it again")


def read_tensors(path: Path, header: Llama2cHeader, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The file's weights under transformers' names, q and k rows in transformers' rotary order."""
    values = np.fromfile(path, dtype="<f4", offset=header.data_offset)
    blocks: dict[str, torch.Tensor] = {}
    position = 0
    for name, shape in header.layout():
        count = int(np.prod(shape))
        blocks[name] = torch.from_numpy(values[position : position + count].reshape(shape))
        position += count
    tensors = {"model.embed_tokens.weight": blocks["embed"], "model.norm.weight": blocks["norm"]}
    if not header.shared_classifier:
        tensors["lm_head.weight"] = blocks["lm_head"]
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{part: f"self_attn.{part}_proj" for part in "qkvo"},
        **{part: f"mlp.{part}_proj" for part in ("gate", "down", "up")},
    }
    rotated = {"q": header.num_heads, "k": header.num_kv_heads}
    for layer in range(header.num_layers):
        for part, name in names.items():
            tensor = blocks[part][layer]
            if part in rotated:
                tensor = interleaved_to_halves(tensor, rotated[part])
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor
    return {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}


def read_tokenizer(path: Path, header: Llama2cHeader) -> PreTrainedTokenizerBase | None:
    """The tokenizer next to the model, ``tok<vocabulary>.bin`` before ``tokenizer.bin``; None without one."""
    for name in (f"tok{header.vocab_size}.bin", "tokenizer.bin"):
        if (beside := path.parent / name).is_file():
            return _build_tokenizer(beside, header)
    return None


def _build_tokenizer(path: Path, header: Llama2cHeader) -> PreTrainedTokenizerBase:
    pieces, scores = _read_pieces(path)
    if len(pieces) != header.vocab_size:
        raise UserError(
            f"source {path}: holds {len(pieces)} tokens but the model has {header.vocab_size}: "
            f"put its own tok{header.vocab_size}.bin next to it"
        )
    # llama2.c writes the special tokens as "\n<s>\n" and "\n</s>\n", and the word marker as a space
    names = [_SPECIAL_IDS.get(index) or piece.replace(" ", "▁") for index, piece in enumerate(pieces)]
    unmergeable = {_UNK, _BOS, _EOS, *(f"<0x{byte:02X}>" for byte in range(256))}
    backend = sentencepiece(names, scores, unmergeable, unknown=_UNK)
    backend.add_special_tokens([_UNK, _BOS, _EOS])
    special = {"bos_token": _BOS, "eos_token": _EOS, "unk_token": _UNK}
    return finish(backend, special, add_bos=True, max_length=header.max_seq_len)


def _read_pieces(path: Path) -> tuple[list[str], list[float]]:
    """int32 maximum length, then for each token float32 score, int32 length, bytes."""
    data = path.read_bytes()
    pieces: list[str] = []
    scores: list[float] = []
    position = 4
    try:
        while position < len(data):
            score, length = struct.unpack_from("<fi", data, position)
            position += 8
            if not 0 <= length <= len(data) - position:
                raise ValueError(f"a token of {length} bytes")
            pieces.append(data[position : position + length].decode("utf-8"))
            scores.append(score)
            position += length
    except (struct.error, ValueError) as error:
        raise UserError(f"source {path}: is not a complete llama2.c tokenizer ({error}): fetch it again") from error
    return pieces, scores
