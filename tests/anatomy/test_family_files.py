"""Families from outside: a table beside the model, in an installed package, or registered from Python."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import dwindle
from dwindle.anatomy import families, family_files
from dwindle.anatomy.anatomy import Anatomy
from dwindle.core.errors import UserError
from dwindle.sources.loading import load_config
from outside_family import STARCODER2, starcoder2, tables
from tiny import tiny_tokenizer


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_registered", {})


def test_a_table_beside_the_model_reaches_every_command_and_its_outputs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    starcoder2().save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    with pytest.raises(UserError, match=r"source .*'starcoder2' is not supported"):
        dwindle.inspect(source)
    (source / "family.toml").write_text(STARCODER2)
    out = tmp_path / "smaller"
    pruned = dwindle.prune(source, "80%", out=out, metric="magnitude")
    assert pruned.after.total < pruned.before.total and len(pruned.structure.hidden) == 32
    families._registered.clear()  # another process
    again = dwindle.load(out)
    assert Anatomy.of(again.model).count(Anatomy.of(again.model).source).total == pruned.after.total
    stock = AutoModelForCausalLM.from_pretrained(out)
    batch = torch.arange(24).reshape(2, 12)
    assert torch.allclose(stock(batch).logits, pruned.model(batch).logits, atol=1e-5)


def test_json_is_the_same_schema(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(STARCODER2)
    table = family_files.read_family(tmp_path / "a.toml")
    (tmp_path / "a.json").write_text(json.dumps(table.model_dump(exclude_defaults=True)))
    assert family_files.read_family(tmp_path / "a.json") == table
    family_files.write_family(table, tmp_path)
    assert family_files.read_family(tmp_path / "family.toml") == table


def test_our_own_tables_survive_the_file_format(tmp_path: Path) -> None:
    """One schema: every built-in table can be written as a file and read back."""
    for name, family in families.FAMILIES.items():
        table = family_files.table_of({"model_type": name, **family.model_dump(exclude_defaults=True)})
        family_files.write_family(table, tmp_path)
        read = family_files.read_family(tmp_path / "family.toml")
        assert families.Family(**read.model_dump(exclude={"model_type"})) == family, name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"ffn hidden"',
            '"ffm hidden"',
            r"a.toml: layer.mlp.c_fc.weight: \"ffm hidden\" has the unit 'ffm': choose among",
        ),
        ('"mlp.c_fc.bias" = "ffn"', '"mlp.c_fc.bias" = ""', r"a.toml: layer.mlp.c_fc.bias: names no unit"),
        ('"model.norm.weight" = "hidden"', '"model.norm.weight" = "ffn"', r"stem.model.norm.weight: .*move the row to"),
        ('model_type = "starcoder2"', "", r"a.toml: model_type"),
        ('model_type = "starcoder2"', 'model_type = "llama"', r"a.toml: model_type: 'llama' is a built-in family"),
        ('["attn", "ffn"]', '["heads"]', r"a.toml: groups.*heads"),
        ("[layer]", "[layers]", r"a.toml: unknown key layers: did you mean layer"),
        ('"hidden query"', '"hidden query', r"a.toml: not valid TOML"),
    ],
)
def test_errors_are_one_line_that_names_the_row(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(STARCODER2.replace(old, new, 1))
    with pytest.raises(UserError, match=message) as refused:
        families.register_family(tmp_path / "a.toml")
    assert "\n" not in str(refused.value)


def test_a_row_with_the_wrong_number_of_axes_is_named() -> None:
    families.register_family(tables(STARCODER2.replace('"ffn hidden"', '"ffn"', 1)))
    with pytest.raises(UserError, match=r'row mlp.c_fc.weight = "ffn" names 1 axes, tensor .* has 2'):
        Anatomy.of(starcoder2())


def test_a_layernorm_cannot_lose_hidden_channels() -> None:
    from dwindle.pruning.surgery import Prunable

    families.register_family(tables(STARCODER2.replace('groups = ["attn", "ffn"]', "")))
    with pytest.raises(UserError, match=r"input_layernorm is a LayerNorm.*leave stem out"):
        Prunable(starcoder2())


def test_an_installed_package_offers_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_families"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "starcoder2.toml").write_text(STARCODER2)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("starcoder2", "my_families", family_files.ENTRY_POINTS)
    offered = [point]
    monkeypatch.setattr(family_files, "entry_points", lambda group: offered)
    assert Anatomy.of(starcoder2()).family.groups == ["attn", "ffn"]
    families._registered.clear()
    offered.append(point)
    with pytest.raises(UserError, match="several packages"):
        Anatomy.of(starcoder2())
    offered[:] = [EntryPoint("starcoder2", "no_such_package", family_files.ENTRY_POINTS)]
    with pytest.raises(UserError, match="no_such_package cannot be loaded"):
        Anatomy.of(starcoder2())
    (package / "starcoder2.toml").unlink()
    offered[:] = [point]
    with pytest.raises(UserError, match=r"holds neither starcoder2.toml nor starcoder2.json"):
        Anatomy.of(starcoder2())


def test_groups_that_a_family_keeps_whole_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    starcoder2().save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    (source / "family.toml").write_text(STARCODER2)
    load_config(source)
    with pytest.raises(UserError, match=r"groups: stem: this family keeps .* choose among attn, ffn"):
        dwindle.prune(source, "80%", metric="magnitude", groups=["stem"])
