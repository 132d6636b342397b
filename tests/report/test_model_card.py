"""The card of an exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run

from dwindle.export.card import Card, model_card
from dwindle.export.origin import origin_of, without_paths
from dwindle.pruning.config import PostTrainingConfig


def parts(run: Path) -> dict[str, Any]:
    structure = json.loads((run / "model" / "structure.json").read_text())
    ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return {"name": "small", "structure": structure, "ledger": ledger}


def card_of(**given: Any) -> str:
    return model_card(Card(**given))


def metadata(card: str) -> dict[str, Any]:
    """The YAML subset that the card uses."""
    block = card.split("---\n")[1]
    found: dict[str, Any] = {}
    key = ""
    for line in block.splitlines():
        if line.startswith("- "):
            found[key].append(line[2:])
            continue
        key, _, value = line.partition(":")
        found[key] = json.loads(value) if value.strip().startswith('"') else value.strip() or []
    return found


def test_card_says_where_it_comes_from_and_what_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", events=40)
    card = card_of(source="org/source", recipe='target = "50%"', results={"validation loss": 2.5}, **parts(run))
    found = metadata(card)
    assert found["base_model"] == "org/source" and found["base_model_relation"] == "finetune"
    assert found["library_name"] == "transformers" and "license" not in found
    assert found["tags"] == ["dwindle", "pruned", "pruning-aware-pretraining"]
    structure = parts(run)["structure"]
    heads = len(structure["layers"][0]["query_heads"])
    assert f"| hidden channels | 32 | {len(structure['hidden'])} |" in card
    assert f"| query heads per layer | 8 | {heads} |" in card
    assert f"| FFN channels per layer | 40 | {len(structure['layers'][0]['ffn'])} |" in card
    assert "| validation loss |  | 2.5 |  |" in card and "40 prune events during continued pretraining" in card
    assert "trust_remote_code" not in card and "add it before publishing" in card


def test_custom_code_is_said(tmp_path: Path) -> None:
    card = card_of(source="smollm2-135m", custom_code=True, **parts(make_run(tmp_path / "run")))
    found = metadata(card)
    assert "custom_code" in found["tags"] and "trust_remote_code=True" in card
    assert (found["base_model"], found["license"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    assert "add it before publishing" not in card


def test_licence_comes_from_the_card_beside_a_local_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    assert origin_of(str(source)).licence is None
    (source / "README.md").write_text("---\nlicense: mit\nbase_model: 'org/first'\ntags:\n- x\n---\nlicense: wrong\n")
    found = origin_of(str(source))
    assert (found.name, found.hub_id, found.licence) == ("source", "org/first", "mit")
    assert origin_of("/gone/away/model.gguf").name == "model.gguf"


def test_a_licence_that_was_added_to_the_card_of_a_hub_model_stays(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    assert origin_of("org/name", card) == origin_of("org/name")
    card.write_text("---\nlicense: mit\nbase_model: org/name\n---\n")
    found = origin_of("org/name", card)
    assert (found.name, found.hub_id, found.licence) == ("org/name", "org/name", "mit")


def test_local_paths_are_not_published(tmp_path: Path) -> None:
    recipe = (
        'model = "/home/me/private/tiny"\ntrain = ["/data/books.txt", "pydoc:train", "~/x/y.txt"]\nlr = 1e-3 # 1/2\n'
    )
    assert without_paths(recipe) == 'model = "tiny"\ntrain = ["books.txt", "pydoc:train", "y.txt"]\nlr = 1e-3 # 1/2\n'
    card = card_of(source="/home/me/private/tiny", recipe=recipe, **parts(make_run(tmp_path / "run")))
    assert "private" not in card and "`tiny`" in card


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('"/home/Alice Smith/secret project/books.txt"', '"books.txt"'),
        ("'/home/Alice Smith/secret project/my books.txt'", "'my books.txt'"),
        (r'"C:\\Users\\Alice Smith\\books.txt"', '"books.txt"'),
        (r"'C:\Users\Alice Smith\books.txt'", "'books.txt'"),
        (r'"/home/Alice \"A\" Smith, [old]/caf\u00e9 1.txt"', '"café 1.txt"'),
        ('"~/Alice Smith/runs/"', '"runs"'),
        ('["/a b/c d.txt", "/e f/g.txt"] # don\'t', '["c d.txt", "g.txt"] # don\'t'),
        ('"org/name" # it is "/home/me/x"', '"org/name" # it is "x"'),
        ('"hub:org/name:train"', '"hub:org/name:train"'),
        ('"https://example.org/a b/c"', '"https://example.org/a b/c"'),
        ('"/"', '"/"'),
    ],
)
def test_quoted_paths_are_shortened_whole(given: str, shown: str) -> None:
    assert without_paths(f"train = {given}\n") == f"train = {shown}\n"


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    given = parts(make_run(tmp_path / "run")) | {"name": "a|b`\n# <script>"}
    card = card_of(source="x", recipe="```\n# <b>", results={"a|b\nc": "1"}, **given)
    assert "# a/b' # &lt;script&gt;" in card and "| a/b c |  | 1 |  |" in card
    assert "````toml\n```\n# <b>\n````" in card


@pytest.mark.parametrize("ledger", [[], [{"event": "source", "parameters": 10, "options": None}]])
def test_a_model_that_lost_nothing(ledger: list[dict[str, Any]]) -> None:
    layers = [{"query_heads": [0], "kv_heads": [0], "kv_of_query": [0], "ffn": [0, 1]}]
    card = card_of(name="m", source="org/s", structure={"hidden": [0], "layers": layers}, ledger=ledger)
    assert "A model derived from [org/s]" in card


def adapted(layers: list[dict[str, Any]], **options: Any) -> str:
    """The card of a model whose layers lost what is not in them; two heads on one key/value head, four channels."""
    gone = [[i for i in range(4) if i not in layer["ffn"]] for layer in layers]
    ledger: list[dict[str, Any]] = [
        {"event": "source", "parameters": 100, "layer_kv_of_query": [[0, 0]] * len(layers), "options": options},
        {"event": "prune", "type": "ffn", "indices": gone, "tokens": 0, "parameters": 80},
    ]
    structure = {"hidden": [0, 1], "layers": layers}
    return card_of(name="m", source="org/s", structure=structure, ledger=ledger, custom_code=True)


def layer(ffn: list[int], kv_of_query: list[int] | None = None) -> dict[str, Any]:
    of = kv_of_query or [0, 0]
    return {"query_heads": list(range(len(of))), "kv_heads": sorted(set(of)), "kv_of_query": of, "ffn": ffn}


def test_layers_of_different_widths_are_not_blamed_on_attention() -> None:
    settings = {"rounds": 5, "amplitude": 0.02, "distance": "cosine", "balance": "score"}
    card = adapted([layer([0, 1, 2]), layer([1])], method="adapt", metric="taylor1", **settings)
    assert (
        "The model has layers with different numbers of FFN channels, so its code is in `modeling_dwindle.py`" in card
    )
    assert "(transformers 5.15 or newer).\n" in card and "vLLM" not in card
    assert "| key/value heads per layer | 1 | 1 |" in card
    for key, value in settings.items():
        assert f"- {key}: {value}" in card
    card = adapted([layer([0], [0, 0, 1]), layer([0])], **PostTrainingConfig(method="uniform").record())
    assert "has query groups of different sizes within a layer and layers with different numbers of heads, so" in card
    assert "vLLM serves it from version 0.28 on; `dwindle export --to hf --as deci` or `--stock`" in card
    assert "- balance: score" in card and "amplitude" not in card


def test_key_value_heads_of_the_source() -> None:
    layers = [layer([0, 1, 2, 3])]
    gone = {"event": "prune", "type": "attn", "indices": [[2, 3]], "tokens": 0, "parameters": 80}
    for known, cell in (({"layer_kv_of_query": [[0, 0, 1, 1, 2, 2]]}, "3"), ({}, "–")):
        ledger = [{"event": "source", "parameters": 100, **known}, gone]
        card = card_of(name="m", source="org/s", structure={"hidden": [0], "layers": layers}, ledger=ledger)
        assert f"| key/value heads per layer | {cell} | 1 |" in card


def test_the_teacher_is_named(tmp_path: Path) -> None:
    given = parts(make_run(tmp_path / "run"))
    recipe = '[distill]\nweight = {}\ntemperature = 2.0\ntop_k = {}\nteacher = "{}"\n'
    card = card_of(source="/home/me/tiny", recipe=recipe.format(0.75, 0, ""), **given)
    assert "- distilled from tiny (the unpruned source), weight 0.75, temperature 2\n" in card
    card = card_of(source="org/s", recipe=recipe.format(0.5, 64, "/home/me/big"), **given)
    assert "- distilled from big, weight 0.5, temperature 2, 64 likeliest tokens\n" in card
    trained = '[source]\nmodel = "/home/me/first"\n' + recipe.format(0.5, 0, "")
    assert "- distilled from first (the" in card_of(source="/runs/kd/model", recipe=trained, **given)
    for nothing in (recipe.format(0.0, 0, "org/t"), "[distill]\n", "distill = 3", "not toml ["):
        assert "distilled" not in card_of(source="org/s", recipe=nothing, **given)


def test_a_llama_stored_as_a_mistral_is_said(tmp_path: Path) -> None:
    given = parts(make_run(tmp_path / "run"))
    said = "a Mistral without sliding window computes the same as a Llama without biases"
    assert said in card_of(source="org/s", model_type="mistral", **given | {"structure": shaped(30, 8)})
    assert said not in card_of(source="org/s", model_type="mistral", **given | {"structure": shaped(32, 8)})
    assert said not in card_of(source="org/s", model_type="qwen2", **given | {"structure": shaped(30, 8)})


def shaped(hidden: int, heads: int) -> dict[str, Any]:
    return {"hidden": list(range(hidden)), "layers": [layer([0, 1], [head // 2 for head in range(heads)])]}
