"""What is written loads anywhere, to the bit; nothing is ever half there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import dwindle
from dwindle.anatomy.anatomy import Anatomy, cut
from dwindle.anatomy.structure import Group, Structure
from dwindle.core.errors import UserError
from dwindle.export.exporting import export
from dwindle.export.huggingface import save_model
from edge_models import tiny_loaded
from tiny import FAMILIES, random_group, tiny_model, tokens


def pruned(family: str, style: str) -> tuple[Any, Structure]:
    """``stock``: 4 heads, hidden size 31 or (if it must be a multiple) 28; ``cluster``: unequal layers."""
    model = tiny_model(family, dtype=torch.float32, attention_bias=False, mlp_bias=False)
    anatomy = Anatomy.of(model)
    structure = anatomy.source
    must_divide = family in ("arcee", "gemma3_text")
    for seed, kind in enumerate(["ffn", "stem", "ffn", *["stem"] * (3 if must_divide else 0)]):
        structure = structure.without(random_group(kind, structure, seed))
    if style == "cluster":
        for seed in range(3):
            structure = structure.without(random_group("attn", structure, seed))
        *others, last = structure.layers  # irregular even with one key/value head, or one for every query
        structure = Structure(structure.hidden, (*others, last.without(ffn=last.ffn[:3])))
    else:
        structure = structure.without(Group("attn", tuple(la.query_heads[::2] for la in structure.layers)))
    return cut(model, anatomy, structure, anatomy.source), structure


def save(model: Any, structure: Structure, out: Path, **options: Any) -> None:
    save_model(model, None, out, structure=structure, source="tiny", ledger=[{"event": "source"}], **options)


@pytest.mark.parity
@pytest.mark.parametrize("style", ["stock", "cluster"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models_load_bit_equal_and_generate_with_cache(family: str, style: str, tmp_path: Path) -> None:
    model, structure = pruned(family, style)
    save(model, structure, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"].startswith("dwindle_") == (style == "cluster")
    batch = tokens(2, 12)
    expected = model(input_ids=batch).logits
    ours = dwindle.load(tmp_path / "out").model
    assert torch.equal(ours(input_ids=batch).logits, expected)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=style == "cluster", dtype=torch.float32
    )
    assert torch.equal(theirs(input_ids=batch).logits, expected)
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache = theirs.generate(batch, use_cache=True, **greedy)
    assert torch.equal(with_cache, theirs.generate(batch, use_cache=False, **greedy))
    cache = theirs(input_ids=batch, use_cache=True).past_key_values
    for number, layer in enumerate(structure.layers):
        assert not layer.kv_heads or cache.layers[number].keys.shape[1] == len(layer.kv_heads)


@pytest.mark.parity
def test_cluster_output_needs_nothing_of_dwindle(tmp_path: Path) -> None:
    """Stock transformers in a process that cannot import dwindle loads it with trust_remote_code."""
    model, structure = pruned("llama", "cluster")
    save(model, structure, tmp_path / "out")
    batch = tokens(1, 6)
    script = (
        "import sys; sys.modules['dwindle'] = None\n"
        "import torch; from transformers import AutoModelForCausalLM\n"
        f"folder = {str(tmp_path / 'out')!r}\n"
        "m = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype='float32')\n"
        f"print(m(input_ids=torch.tensor({batch.tolist()})).logits.double().flatten().tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    expected = model(input_ids=batch).logits.double()
    found = torch.tensor(json.loads(done.stdout)).double().view_as(expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)  # the other process may use other kernels


def test_a_saved_cluster_model_can_be_pruned_again(tmp_path: Path) -> None:
    model, structure = pruned("llama", "cluster")
    save(model, structure, tmp_path / "out")
    again = dwindle.prune(tmp_path / "out", "90%", metric="magnitude", attention="cluster", out=tmp_path / "again")
    assert again.after.total == sum(p.numel() for p in dwindle.load(tmp_path / "again").model.parameters())
    with pytest.raises(UserError, match="already has cluster attention"):
        dwindle.prune(tmp_path / "out", "90%", metric="magnitude")


def test_an_existing_output_is_refused_and_replaced_only_when_asked(tmp_path: Path) -> None:
    model, structure = pruned("llama", "stock")
    save(model, structure, tmp_path / "out")
    (tmp_path / "out" / "mark").touch()
    with pytest.raises(UserError, match="already exists: choose another directory or pass --overwrite"):
        save(model, structure, tmp_path / "out")
    save(model, structure, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "mark").exists()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").touch()
    with pytest.raises(UserError, match="already exists and has no"):
        save(model, structure, tmp_path / "notes", overwrite=True)
    (tmp_path / "notes" / "config.json").touch()  # of any Hugging Face model: no sign that dwindle wrote it
    with pytest.raises(UserError, match=r"no structure\.json"):
        save(model, structure, tmp_path / "notes", overwrite=True)
    with pytest.raises(UserError, match="already exists") as refused:
        save(model, structure, tmp_path / "notes")
    assert "--overwrite" not in str(refused.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "out"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, structure = pruned("llama", "stock")
    save(model, structure, tmp_path / "out")
    before = sorted(p.name for p in (tmp_path / "out").iterdir())

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    for place in ("out", "new"):
        with pytest.raises(UserError, match="No space left on device"):
            save(model, structure, tmp_path / place, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == before


def test_the_card_has_the_name_of_the_run(tmp_path: Path) -> None:
    model, structure = pruned("llama", "stock")
    places = {"smaller": "# smaller", "runs/kd/model": "# kd", "runs/kd/milestones/60%": "# kd, 60%"}
    for place, title in places.items():
        save(model, structure, tmp_path / place)
        assert title in (tmp_path / place / "README.md").read_text().splitlines()
    assert "stored as a Mistral" in (tmp_path / "smaller" / "README.md").read_text()


def test_a_row_that_no_prompt_reads_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrongly(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        embedding = tensors["model.embed_tokens.weight"].clone()
        embedding[305] *= -1
        return tensors | {"model.embed_tokens.weight": embedding}

    monkeypatch.setattr("dwindle.export.huggingface.remove_tied_weights_from_state_dict", wrongly)
    for layout in (None, "deci"):
        with pytest.raises(UserError, match=r"model.embed_tokens.weight was written with other values"):
            export(tiny_loaded(), "hf", tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_comes_back_as_another_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gives a Qwen 2 a normalizer and a pattern of its own, whatever ``tokenizer.json`` says."""
    loaded = tiny_loaded("qwen2")
    export(loaded, "hf", tmp_path / "out")
    monkeypatch.setattr("dwindle.sources.huggingface._is_all_in_json", lambda folder: False)
    with pytest.raises(UserError, match="is not the same after it was saved and loaded"):
        export(loaded, "hf", tmp_path / "other")
    assert not (tmp_path / "other").exists()
