"""The TOML machinery: exact round trips, and errors that a person can act on."""

from __future__ import annotations

import os
import random
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from dwindle.core.config import apply_overrides, field_docs, from_dict, from_toml, read_toml, to_toml, write_toml
from dwindle.core.errors import UserError
from dwindle.core.files import NotWritten


@dataclass(kw_only=True, slots=True)
class Text:
    paths: list[str]
    weight: float = 1.0


@dataclass(kw_only=True, slots=True)
class Training:
    lr: float = 1e-3
    """Peak learning rate."""
    steps: int = 10
    """Optimizer steps,
    in all."""
    compile: bool = False
    schedule: Literal["cosine", "wsd"] = "cosine"
    tokens: str | int = "16M"
    warmup: int | float = 0.02
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    seq_len: int = 8


@dataclass(kw_only=True, slots=True)
class Data:
    train: list[str] | dict[str, Text]
    cache: str | None = None
    limit: int | None = None
    kinds: list[Literal["a", "b"]] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    extra: Text | None = None
    parts: list[Text] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Config:
    name: str
    data: Data
    training: Training = field(default_factory=Training)
    """How the model learns."""


MINIMAL: dict[str, Any] = {"name": "x", "data": {"train": ["a.txt"]}}


def error_of(data: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        from_dict(Config, data, "recipe.toml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def override_error(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        apply_overrides(MINIMAL, overrides, Config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def overridden(*overrides: str) -> Config:
    return from_dict(Config, apply_overrides(MINIMAL, overrides, Config))


def test_defaults_and_types() -> None:
    config = from_dict(Config, {**MINIMAL, "training": {"lr": 1, "warmup": 5, "tokens": 7}})
    assert config.training.lr == 1.0 and type(config.training.lr) is float
    assert config.training.warmup == 5 and type(config.training.warmup) is int
    assert config.training.tokens == 7
    assert config.training.betas == [0.9, 0.95]
    assert config.data.cache is None


def test_union_of_list_and_tables() -> None:
    tables = {"name": "x", "data": {"train": {"books": {"paths": ["b"], "weight": 2}}}}
    assert from_dict(Config, tables).data.train == {"books": Text(paths=["b"], weight=2.0)}
    tables["data"]["train"]["books"]["wieght"] = 1  # type: ignore[index]
    assert error_of(tables).endswith("unknown key data.train.books.wieght: did you mean data.train.books.weight?")


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"lr": "fast"}, 'training.lr: expected a number, got "fast"'),
        ({"lr": True}, "training.lr: expected a number, got true"),
        ({"lr": float("nan")}, "training.lr: expected a finite number, got nan"),
        ({"lr": 10**400}, "training.lr: expected a finite number, got 1000"),
        ({"steps": 1.5}, "training.steps: expected a whole number, got 1.5"),
        ({"steps": False}, "training.steps: expected a whole number, got false"),
        ({"compile": 1}, "training.compile: expected true or false, got 1"),
        ({"tokens": 1.5}, "training.tokens: expected text or a whole number, got 1.5"),
        ({"warmup": "x"}, 'training.warmup: expected a whole number or a number, got "x"'),
        ({"betas": 0.9}, "training.betas: expected a list of numbers, got 0.9"),
        ({"betas": [0.9, "b"]}, 'training.betas.1: expected a number, got "b"'),
        ({"schedule": "cosin"}, 'training.schedule: expected one of "cosine", "wsd", got "cosin" (did you mean'),
        ({"learning_rate": 1}, "unknown key training.learning_rate: did you mean training.lr?"),
        ({"sequence_len": 1}, "unknown key training.sequence_len: did you mean training.seq_len?"),
        ({"zzz": 1}, "unknown key training.zzz: [training] takes lr, steps, compile,"),
        (3, "training: expected a table, got 3"),
    ],
)
def test_wrong_values_name_the_key(training: Any, message: str) -> None:
    assert error_of({**MINIMAL, "training": training}).startswith(f"recipe.toml: {message}")


def test_a_key_of_another_section_comes_after_those_of_this_one() -> None:
    said = error_of({**MINIMAL, "data": {"train": ["a"], "lr": 3}})
    assert said.startswith("recipe.toml: unknown key data.lr: [data] takes train, ")
    assert said.endswith("; or did you mean training.lr?")


def test_wrong_values_elsewhere() -> None:
    assert 'name: expected text, got 3 (write "3")' in error_of({**MINIMAL, "name": 3})
    assert "unknown key lr: did you mean training.lr?" in error_of({**MINIMAL, "lr": 3})
    assert 'data.kinds.0: expected one of "a", "b", got "c"' in error_of(
        {"name": "x", "data": {"train": [], "kinds": ["c"]}}
    )
    dated = tomllib.loads('name = 2024-01-01\n[data]\ntrain = ["a"]')
    assert "name: expected text, got the date or time 2024-01-01" in error_of(dated)
    assert "name: missing: add name = … (text) at the top" in error_of({"data": {"train": []}})
    assert "data.train: missing: add train = … (a list of texts or a table) under [data]" in error_of({"name": "x"})


def random_text(rng: random.Random) -> str:
    alphabet = "aé漢🙂\"'\\\n\r\t\b\f\x00\x1f\x7f\x85\u2028 #=[]{}.,$\ud7ff\ue000"
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(12)))


def random_float(rng: random.Random) -> float:
    fixed = [0.0, -0.0, 1e-05, 1e-08, 1e16, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 3.0]
    return rng.choice([*fixed, rng.uniform(-1, 1) * 10.0 ** rng.randrange(-300, 300)])


def random_source(rng: random.Random) -> Text:
    return Text(paths=[random_text(rng) for _ in range(rng.randrange(3))], weight=random_float(rng))


def random_config(rng: random.Random) -> Config:
    names = [random_text(rng) for _ in range(3)]
    sources = {name: random_source(rng) for name in names}
    return Config(
        name=random_text(rng),
        data=Data(
            train=rng.choice([list(names), sources, [], {}]),
            cache=rng.choice([None, random_text(rng)]),
            limit=rng.choice([None, rng.randrange(-(2**63), 2**63)]),
            weights={name: random_float(rng) for name in names[: rng.randrange(4)]},
            extra=rng.choice([None, random_source(rng)]),
            parts=[random_source(rng) for _ in range(rng.randrange(3))],
        ),
        training=Training(
            lr=random_float(rng),
            compile=rng.random() < 0.5,
            tokens=rng.choice([random_text(rng), rng.randrange(100)]),
            warmup=rng.choice([rng.randrange(10), random_float(rng)]),
            betas=[random_float(rng) for _ in range(rng.randrange(3))],
        ),
    )


def test_round_trip_of_many_values() -> None:
    rng = random.Random(0)
    for _ in range(500):
        config = random_config(rng)
        text = to_toml(config, comments=rng.random() < 0.5)
        again = from_toml(Config, text)
        assert again == config
        assert type(again.training.warmup) is type(config.training.warmup)
        assert to_toml(again) == to_toml(config)


def test_text_of_a_config() -> None:
    config = Config(
        name='say "é"', data=Data(train={"my books": Text(paths=["a"])}), training=Training(lr=1e-5, betas=[])
    )
    assert to_toml(config, comments=True) == (
        'name = "say \\"é\\""\n\n'
        '[data]\nkinds = []\nparts = []\n\n[data.train]\n\n[data.train."my books"]\npaths = ["a"]\nweight = 1.0\n\n'
        "# How the model learns.\n[training]\n# Peak learning rate.\nlr = 1e-05\n# Optimizer steps,\n# in all.\n"
        'steps = 10\ncompile = false\nschedule = "cosine"\ntokens = "16M"\nwarmup = 0.02\nbetas = []\nseq_len = 8\n'
    )


def test_values_that_toml_cannot_hold() -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(UserError, match=r"training\.lr: .* finite"):
            to_toml(Config(name="x", data=Data(train=[]), training=Training(lr=value)))
    with pytest.raises(UserError, match=r"name: .* not valid Unicode"):
        to_toml(Config(name="\udc80", data=Data(train=[])))


def test_docs_are_optional() -> None:
    assert field_docs(Training)["lr"] == "Peak learning rate."
    namespace: dict[str, Any] = {"dataclass": dataclass}
    exec("@dataclass\nclass Made:\n    x: int = 1\n    'gone'\n", namespace)  # no source text to read
    assert field_docs(namespace["Made"]) == {}
    assert to_toml(namespace["Made"](), comments=True) == "x = 1\n"


def test_overrides_are_read_as_the_field_wants() -> None:
    config = overridden(
        "name=0.6",
        "training.lr=3e-4",
        "training.steps = 7",
        "training.compile=true",
        "training.tokens=70M",
        "training.schedule=wsd",
        "training.betas=0.8, 0.9",
        'data.train=["a.txt", "b c.txt"]',
        "data.cache=a=b",
        "data.kinds=a,b",
        "data.weights.x=2",
    )
    assert config.name == "0.6"
    assert config.training == Training(lr=3e-4, steps=7, compile=True, tokens="70M", schedule="wsd", betas=[0.8, 0.9])
    assert config.data.train == ["a.txt", "b c.txt"]
    assert config.data.cache == "a=b"
    assert config.data.kinds == ["a", "b"]
    assert config.data.weights == {"x": 2.0}
    assert overridden("training.tokens=5").training.tokens == 5
    assert overridden("data.train=[a.txt,b.txt]").data.train == ["a.txt", "b.txt"]
    assert overridden("data.train=a.txt").data.train == ["a.txt"]
    assert overridden("data.train=").data.train == []
    assert overridden('data.train={books={paths=["b"]}}').data.train == {"books": Text(paths=["b"])}
    assert overridden('data.weights."a.b"=1').data.weights == {"a.b": 1.0}
    assert overridden("data.cache=here", "data.cache=none").data.cache is None
    assert overridden("name=none").name == "none"
    assert overridden("data.kinds=a,b", "data.kinds=none").data.kinds == Data(train=[]).kinds == []
    assert MINIMAL == {"name": "x", "data": {"train": ["a.txt"]}}


def test_overrides_of_a_table_may_be_partial() -> None:
    data = {"name": "x", "data": {"train": {"books": {"paths": ["b"]}}}}
    merged = apply_overrides(data, ["data.train.books.weight=0.5", "data.extra={weight=2}"], Config)
    assert merged["data"]["train"]["books"] == {"paths": ["b"], "weight": 0.5}
    assert "data.extra.paths: missing" in error_of(merged)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lr=fast", 'training.lr: expected a number, got "fast"'),
        ("training.lr=", 'training.lr: expected a number, got ""'),
        ("training.lr=inf", "training.lr: expected a finite number, got inf"),
        ("training.betas=1,x", 'training.betas: expected a number, got "x"'),
        ("training.schedule=cosin", 'training.schedule: expected one of "cosine", "wsd", got "cosin"'),
        ("data.kinds=a,c", 'data.kinds: expected one of "a", "b", got "c"'),
        ("training.learning_rate=1", "unknown key training.learning_rate: did you mean training.lr?"),
        ("training=5", "training: expected a table, got 5"),
        ("training.lr.x=5", "training.lr: expected a number, it has no keys of its own"),
        ("training", "write section.key=value"),
        ("=5", "write section.key=value"),
        ("#a=5", "#a is not a dotted key such as section.name"),
        ("a..b=5", "a..b is not a dotted key such as section.name"),
        ("name.x=5", "name: expected text, it has no keys of its own"),
    ],
)
def test_wrong_overrides_name_themselves(override: str, message: str) -> None:
    assert override_error(override).startswith(f"override {override}: {message}")


def test_override_below_a_value_that_is_no_table() -> None:
    with pytest.raises(UserError, match=r"training: expected a table, got 3"):
        apply_overrides({"training": 3}, ["training.lr=1"], Config)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken, latin, marked = tmp_path / "broken.toml", tmp_path / "latin.toml", tmp_path / "bom.toml"
    broken.write_text("a = 1\nb 2\n")
    latin.write_bytes(b'a = "\xe9"')
    marked.write_bytes(b"\xef\xbb\xbfa = 1\r\n")
    with pytest.raises(UserError, match=r"missing\.toml does not exist"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(UserError, match="is a directory"):
        read_toml(tmp_path)
    with pytest.raises(UserError, match=r"broken\.toml: not valid TOML: .*line 2"):
        read_toml(broken)
    with pytest.raises(UserError, match=r"latin\.toml is not UTF-8"):
        read_toml(latin)
    with pytest.raises(UserError, match="cannot be read"):
        read_toml(broken / "below-a-file.toml")
    assert read_toml(marked) == {"a": 1}


def test_saving_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved.toml"
    config = overridden("name=first")
    write_toml(config, path, comments=True)
    assert from_dict(Config, read_toml(path)) == config

    def disk_full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(NotWritten, match="No space"):
        write_toml(overridden("name=second"), path)
    assert from_dict(Config, read_toml(path)) == config
    assert [file.name for file in tmp_path.iterdir()] == ["saved.toml"]
