"""A dense Granite 4 is a Granite 3 with other names."""

from __future__ import annotations

import pytest
import torch

from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.export.equivalents import in_common_terms
from tiny import random_group, tiny_model, tokens


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kinds", [[], ["stem", "ffn"], ["stem", "ffn", "attn"]])
def test_dense_granite_4_equals_its_granite_3(kinds: list[str], tied: bool) -> None:
    model = tiny_model("granitemoehybrid", tie_word_embeddings=tied)
    anatomy = Anatomy.of(model)
    keep = anatomy.source
    for seed, kind in enumerate(kinds):
        keep = keep.without(random_group(kind, keep, seed))
    model = cut(model, anatomy, keep, anatomy.source)
    granite, batch = in_common_terms(model), tokens(2, 16)
    assert granite.config.model_type in ("granite", "dwindle_granite")
    assert torch.equal(granite(batch).logits, model(batch).logits)
    assert in_common_terms(granite) is granite


def test_a_granite_4_without_rotation_stays_one() -> None:
    model = tiny_model("granitemoehybrid", position_embedding_type="nope")
    assert in_common_terms(model) is model
