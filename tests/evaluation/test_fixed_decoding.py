"""Decoding with keys and values in fixed places: the logits of a plain forward pass, whatever the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dwindle.evaluation import fixed_decoding
from dwindle.evaluation.config import SamplingConfig
from dwindle.evaluation.sampling import BatchDecoder, decode
from dwindle.training.sampling import evaluating
from tiny import shrunk, tiny_model, tokens

ROWS = [tokens(1, length, seed=length)[0].tolist() for length in (9, 4, 7, 1)]


@pytest.mark.parametrize("kind", ["stock", "unequal", "cluster"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "granite", "phi3", "arcee"])
def test_logits_are_those_of_a_plain_pass(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows, buffers that grow by three tokens, rows that leave."""
    monkeypatch.setattr(fixed_decoding, "BLOCK", 3)
    model = shrunk(family, kind)[0]
    with evaluating(model):
        decoder = BatchDecoder(model, ROWS, SamplingConfig(), None, fixed=True)
        rows = [list(row) for row in ROWS]
        for step in range(9):
            if step == 5:
                decoder.keep([0, 3])
                rows = [rows[0], rows[3]]
            found_B = decoder.step().tolist()
            assert decoder._fixed is not None
            for row, found in zip(rows, found_B, strict=True):
                assert found == int(last_logits(model, row).argmax())
                row.append(found)
            fresh_BV = decoder._fixed.logits(decoder._fresh_BT).clone()
            torch.testing.assert_close(fresh_BV, torch.stack([last_logits(model, row) for row in rows]))
            undo(decoder._fixed)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "lfm2", "granite_swa"])
def test_layers_with_windows_convolutions_or_sinks_decode_as_before(family: str) -> None:
    model = shrunk(family, "stock")[0]
    with evaluating(model):
        decoder = BatchDecoder(model, [ROWS[0], ROWS[0]], SamplingConfig(), None, fixed=True)
        decoder.step()
    assert decoder._fixed is None


def last_logits(model: Any, row: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1]
    return logits


def undo(decoder: fixed_decoding.FixedDecoder) -> None:
    """Take the last token back, which the next step appends again."""
    decoder._used -= 1
    decoder._slot -= 1
    decoder._position_B1 -= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_on_a_gpu_are_those_of_plain_steps(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=torch.float64).to("cuda")
    how, keys = SamplingConfig(temperature=temperature, seed=3), [[number] for number in range(len(ROWS))]
    graphed = decode(model, ROWS, how, count=40, ends=(5,), keys=keys)
    monkeypatch.setattr(fixed_decoding.FixedDecoder, "fits", staticmethod(lambda model, cache: False))
    assert graphed == decode(model, ROWS, how, count=40, ends=(5,), keys=keys)
