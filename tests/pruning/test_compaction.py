"""Sizes to rebuild at: multiples, and only what lives beside them."""

from __future__ import annotations

import torch

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import config_for
from dwindle.anatomy.structure import Group
from dwindle.pruning.compaction import rounded_up
from dwindle.pruning.surgery import Prunable
from tiny import tiny_model


def test_widths_are_multiples_and_hold_what_lives() -> None:
    """Each layer for itself; heads are not padded."""
    anatomy = Anatomy.of(tiny_model("llama", num_hidden_layers=4))
    source, widths = anatomy.source, [37, 40, 12, 13]
    removed = [(), (0, 1), (0, 2, 4, 6), (0, 1, 2, 3, 4, 7)]
    alive = source.without(Group("ffn", tuple(tuple(range(width)[::-1][: 40 - width]) for width in widths)))
    alive = alive.without(Group("attn", tuple(removed))).without(Group("stem", ((1, 3, 5),)))
    keep = rounded_up(alive, source, 4)
    assert source.contains(keep) and keep.contains(alive)
    assert [len(la.ffn) for la in keep.layers] == [-(-len(la.ffn) // 4) * 4 for la in alive.layers]
    assert len(keep.hidden) == -(-len(alive.hidden) // 4) * 4
    assert [la.query_heads for la in keep.layers] == [la.query_heads for la in alive.layers]
    # A model that was rebuilt before lacks channels: then a layer has those that are left.
    fewer = keep.without(Group("ffn", ((), (), (), tuple(keep.layers[3].ffn[-1:]))))
    again = rounded_up(fewer, fewer, 4)
    assert again.layers[3].ffn == fewer.layers[3].ffn


def test_the_configuration_depends_on_the_sizes_and_not_on_those_before() -> None:
    """31 of 32 hidden channels make a Llama of 8 heads a Mistral; with 24 it is a Llama again, as in a resumed run."""
    prunable = Prunable(tiny_model("llama", dtype=torch.float32, attention_bias=False, mlp_bias=False))
    source, seen = prunable.model.config, []
    for removed in ((1,), (2, 3, 4, 5, 6, 7, 8)):
        prunable.prune_to(prunable.alive.without(Group("stem", (removed,))))
        prunable.compact()
        seen.append(prunable.model.config.model_type)
        expected = config_for(source, prunable.alive).to_diff_dict()
        assert prunable.model.config.to_diff_dict() == expected | {"dtype": "float32"}
    assert seen == ["mistral", "llama"]
