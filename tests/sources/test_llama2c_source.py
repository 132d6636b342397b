"""llama2.c files: written here as ``export.py`` does, compared with a plain reimplementation of ``run.c``."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dwindle.core.errors import UserError
from dwindle.sources.loading import load, load_config, load_tokenizer

DIM, FFN, LAYERS, HEADS, KV_HEADS, VOCAB, SEQ = 32, 44, 3, 4, 2, 300, 64
HEAD_DIM = DIM // HEADS

Weights = dict[str, np.ndarray]


def random_weights(seed: int = 0) -> Weights:
    generator = np.random.default_rng(seed)
    shapes = {
        "embed": (VOCAB, DIM),
        "rms_att": (LAYERS, DIM),
        "wq": (LAYERS, DIM, DIM),
        "wk": (LAYERS, KV_HEADS * HEAD_DIM, DIM),
        "wv": (LAYERS, KV_HEADS * HEAD_DIM, DIM),
        "wo": (LAYERS, DIM, DIM),
        "rms_ffn": (LAYERS, DIM),
        "w1": (LAYERS, FFN, DIM),
        "w2": (LAYERS, DIM, FFN),
        "w3": (LAYERS, FFN, DIM),
        "rms_final": (DIM,),
        "wcls": (VOCAB, DIM),
    }
    return {name: generator.normal(0.1, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def write(path: Path, weights: Weights, *, version: int, shared: bool) -> Path:
    sizes = (DIM, FFN, LAYERS, HEADS, KV_HEADS)
    if version == 0:
        header = struct.pack("<7i", *sizes, VOCAB if shared else -VOCAB, SEQ)
        order = ["embed", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", "freqs"]
    else:
        header = struct.pack("<Ii7iB", 0x616B3432, 1, *sizes, VOCAB, SEQ, shared).ljust(256, b"\0")
        order = ["rms_att", "rms_ffn", "rms_final", "embed", "wq", "wk", "wv", "wo", "w1", "w2", "w3"]
    if not shared:
        order.append("wcls")
    blocks = {**weights, "freqs": np.full((2, SEQ, HEAD_DIM // 2), 7.0, np.float32)}
    path.write_bytes(header + b"".join(blocks[name].astype("<f4").tobytes() for name in order))
    return path


def run_c(weights: Weights, tokens: list[int], shared: bool) -> np.ndarray:
    """``forward`` of run.c, one position after the other, neighbouring channels rotated together."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    keys: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
    values: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
    out = []

    def rmsnorm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return gain * x / np.sqrt((x * x).mean() + 1e-5)

    def rotate(vector: np.ndarray, position: int) -> np.ndarray:
        result = vector.copy()
        for i in range(0, len(vector), 2):
            angle = position / 10000.0 ** ((i % HEAD_DIM) / HEAD_DIM)
            a, b = vector[i], vector[i + 1]
            result[i] = a * np.cos(angle) - b * np.sin(angle)
            result[i + 1] = a * np.sin(angle) + b * np.cos(angle)
        return result

    for position, token in enumerate(tokens):
        x = w["embed"][token].copy()
        for layer in range(LAYERS):
            h = rmsnorm(x, w["rms_att"][layer])
            q = rotate(w["wq"][layer] @ h, position)
            keys[layer].append(rotate(w["wk"][layer] @ h, position))
            values[layer].append(w["wv"][layer] @ h)
            heads = []
            for head in range(HEADS):
                part = slice(head // (HEADS // KV_HEADS) * HEAD_DIM, (head // (HEADS // KV_HEADS) + 1) * HEAD_DIM)
                query = q[head * HEAD_DIM : (head + 1) * HEAD_DIM]
                scores = np.array([query @ key[part] for key in keys[layer]]) / np.sqrt(HEAD_DIM)
                scores = np.exp(scores - scores.max())
                scores /= scores.sum()
                heads.append(sum(s * value[part] for s, value in zip(scores, values[layer], strict=True)))
            x = x + w["wo"][layer] @ np.concatenate(heads)
            h = rmsnorm(x, w["rms_ffn"][layer])
            gate = w["w1"][layer] @ h
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        x = rmsnorm(x, w["rms_final"])
        out.append((w["embed"] if shared else w["wcls"]) @ x)
    return np.stack(out)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_logits_equal_run_c(version: int, shared: bool, tmp_path: Path) -> None:
    weights = random_weights()
    loaded = load(write(tmp_path / "m.bin", weights, version=version, shared=shared), dtype="float64")
    assert loaded.kind == "llama2c" and loaded.tokenizer is None
    tokens = [1, 17, 299, 4, 4, 150, 77, 23, 8, 200]
    with torch.no_grad():
        found = loaded.model(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(found, run_c(weights, tokens, shared), atol=1e-5)
    assert loaded.model.config.tie_word_embeddings is shared
    assert load_config(tmp_path / "m.bin").max_position_embeddings == SEQ


def vocabulary() -> list[tuple[str, float]]:
    """Bytes, letters, and invented pieces with falling scores, as SentencePiece numbers them."""
    generator = random.Random(0)
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    known = [" ", *"abcdeé"]
    joined: list[str] = []
    while len(pieces) + len(known) + len(joined) < VOCAB:
        piece = generator.choice(known + joined) + generator.choice(known + joined)
        if piece not in known + joined and len(piece) < 7 and " " not in piece[1:]:
            joined.append(piece)
    scored = [(piece, 0.0) for piece in pieces]
    return scored + [(piece, -float(rank)) for rank, piece in enumerate(joined + known)]


def write_tokenizer(path: Path, entries: list[tuple[str, float]]) -> Path:
    body = b"".join(struct.pack("<fi", score, len(text.encode())) + text.encode() for text, score in entries)
    path.write_bytes(struct.pack("<i", max(len(text.encode()) for text, _ in entries)) + body)
    return path


def encode_c(entries: list[tuple[str, float]], text: str) -> list[int]:
    """``encode`` of run.c: begin token, a blank in front, characters or bytes, then the best pair again and again."""
    lookup: dict[str, int] = {}
    for index, (piece, _) in enumerate(entries):
        lookup.setdefault(piece, index)
    ids = [1]
    if text:
        ids.append(lookup[" "])
    for character in text:
        ids += [lookup[character]] if character in lookup else [byte + 3 for byte in character.encode()]
    while True:
        best, place = -1e10, -1
        for i in range(len(ids) - 1):
            merged = lookup.get(entries[ids[i]][0] + entries[ids[i + 1]][0])
            if merged is not None and entries[merged][1] > best:
                best, place = entries[merged][1], i
        if place < 0:
            return ids
        ids[place : place + 2] = [lookup[entries[ids[place]][0] + entries[ids[place + 1]][0]]]


def check_tokenizer(tokenizer: object, entries: list[tuple[str, float]], texts: list[str]) -> None:
    for text in texts:
        ids = tokenizer(text)["input_ids"]  # type: ignore[operator]
        assert ids == encode_c(entries, text), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["tokenizer.bin", f"tok{VOCAB}.bin"])
def test_tokenizer_equals_run_c(name: str, tmp_path: Path) -> None:
    model = write(tmp_path / "m.bin", random_weights(), version=0, shared=True)
    entries = vocabulary()
    write_tokenizer(tmp_path / name, entries)
    tokenizer = load_tokenizer(model)
    generator = random.Random(1)
    texts = ["", " ", "a", "  ab  ", "ünïcödé 日本 🤖", "line\nline\ttab"]
    texts += ["".join(generator.choices(" abcdeéz\n", k=generator.randrange(1, 60))) for _ in range(300)]
    check_tokenizer(tokenizer, entries, texts)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


def test_saved_model_and_tokenizer_load_in_plain_transformers(tmp_path: Path) -> None:
    source = write(tmp_path / "m.bin", random_weights(), version=1, shared=False)
    write_tokenizer(tmp_path / "tokenizer.bin", vocabulary())
    model, tokenizer = load(source)
    model.save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 5, 200, 40]])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(ids).logits, model(ids).logits)
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert all(reloaded(t)["input_ids"] == tokenizer(t)["input_ids"] for t in ["", "abc é", "  a\n\nb"])


def test_bad_files_are_named(tmp_path: Path) -> None:
    weights = random_weights()
    path = write(tmp_path / "m.bin", weights, version=0, shared=True)
    whole = path.read_bytes()
    for content in (b"", whole[:20], whole[:-4], whole + b"\0\0\0\0", b"PK" + whole[2:], bytes(400), whole[::-1]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"m\.bin.*:"):
            load(path)
    path.write_bytes(struct.pack("<Ii", 0x616B3432, 2) + whole)
    with pytest.raises(UserError, match="version 2"):
        load(path)
    weights["w2"][1, 2, 3] = np.inf
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds non-finite"):
        load(write(path, weights, version=0, shared=True))


def test_bad_tokenizers_are_named(tmp_path: Path) -> None:
    model = write(tmp_path / "m.bin", random_weights(), version=0, shared=True)
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(model)
    path = write_tokenizer(tmp_path / "tokenizer.bin", vocabulary()[:-1])
    with pytest.raises(UserError, match=r"tokenizer\.bin: holds 299 tokens but the model has 300"):
        load_tokenizer(model)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"tokenizer\.bin: is not a complete"):
        load(model)


def test_stories260k_tells_stories(shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K"
    model, tokenizer = load(folder / "stories260K.bin")
    assert sum(parameter.numel() for parameter in model.parameters()) == 260_032
    entries = read_entries(folder / "tok512.bin")
    text = (shared_data / "corpus" / "tinystories-sample.txt").read_text(encoding="utf-8")
    check_tokenizer(tokenizer, entries, [text[start : start + 200] for start in range(0, 8000, 400)])
    ids = torch.tensor(tokenizer(text[:12000])["input_ids"][: 10 * 256]).reshape(10, 256)
    ids[:, 0] = 1
    with torch.no_grad():
        assert model(ids, labels=ids).loss.item() < 1.7
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    story = model.generate(prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=30)
    assert tokenizer.decode(story[0], skip_special_tokens=True).startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside"
    )


def read_entries(path: Path) -> list[tuple[str, float]]:
    data, position, entries = path.read_bytes(), 4, []
    while position < len(data):
        score, length = struct.unpack_from("<fi", data, position)
        entries.append((data[position + 8 : position + 8 + length].decode(), score))
        position += 8 + length
    return entries


def test_a_folder_with_one_is_told_to_name_it(tmp_path: Path) -> None:
    file = write(tmp_path / "m.bin", random_weights(), version=0, shared=True)
    with pytest.raises(UserError, match=r"has no config\.json: give the llama2\.c file in it, .*m\.bin$"):
        load(tmp_path)
    file.write_bytes(b"something else")
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        load(tmp_path)
