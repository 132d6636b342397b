"""Configurations: strict types, exact round trips, and errors that a person can act on."""

from __future__ import annotations

import inspect
import os
import random
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from dwindle.core.config import (
    Config,
    apply_overrides,
    default_of,
    describe_type,
    from_dict,
    in_section,
    iter_fields,
    parse_toml,
    read_toml,
    takes,
    to_toml,
    value_from_text,
    write_toml,
)
from dwindle.core.errors import UserError
from dwindle.core.files import NotWritten


class Text(Config):
    paths: list[str]
    weight: Annotated[float, Field(gt=0)] = 1.0


class Training(Config):
    """How the model learns."""

    lr: float = 1e-3
    """Peak learning rate."""
    steps: Annotated[int, Field(ge=1)] = 10
    """Optimizer steps,
    in all."""
    compile: bool = False
    schedule: Literal["cosine", "wsd"] = "cosine"
    tokens: str | int = "16M"
    warmup: int | float = 0.02
    betas: list[float] = Field(default_factory=lambda: [0.9, 0.95])
    seq_len: int = 8
    clip: Annotated[float, Field(ge=0, lt=1)] = 0.5
    limit: Annotated[int, Field(ge=1)] | None = None
    group: Annotated[int, Field(ge=2, multiple_of=2)] = 32

    @model_validator(mode="after")
    def _check(self) -> Training:
        if len(self.betas) > 2:
            raise ValueError("betas: give two numbers")
        return self


class Data(Config):
    train: list[str]
    sources: dict[str, Text] = Field(default_factory=dict)
    cache: str | None = None
    limit: int | None = None
    kinds: list[Literal["a", "b"]] = Field(default_factory=list)
    weights: dict[str, float] = Field(default_factory=dict)
    extra: Text | None = None
    parts: list[Text] = Field(default_factory=list)


class Run(Config):
    name: str
    data: Data
    training: Training = Field(default_factory=Training)
    """How the model learns."""


MINIMAL: dict[str, Any] = {"name": "x", "data": {"train": ["a.txt"]}}


def error_of(data: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        from_dict(Run, data, "recipe.toml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def override_error(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        apply_overrides(MINIMAL, overrides, Run)
    message = str(caught.value)
    assert "\n" not in message
    return message


def overridden(*overrides: str) -> Run:
    return from_dict(Run, apply_overrides(MINIMAL, overrides, Run))


def test_defaults_and_types() -> None:
    config = from_dict(Run, {**MINIMAL, "training": {"lr": 1, "warmup": 5, "tokens": 7}})
    assert config.training.lr == 1.0 and type(config.training.lr) is float
    assert config.training.warmup == 5 and type(config.training.warmup) is int
    assert config.training.tokens == 7
    assert config.training.betas == [0.9, 0.95]
    assert config.data.cache is None


def test_tables_inside_are_as_strict() -> None:
    tables: dict[str, Any] = {"name": "x", "data": {"train": [], "sources": {"books": {"paths": ["b"], "weight": 2}}}}
    assert from_dict(Run, tables).data.sources == {"books": Text(paths=["b"], weight=2.0)}
    tables["data"]["sources"]["books"]["wieght"] = 1
    assert error_of(tables).endswith("unknown key data.sources.books.wieght: did you mean data.sources.books.weight?")
    tables["data"] = {"train": [], "extra": {"paths": [], "wieght": 1}}
    assert error_of(tables).endswith("unknown key data.extra.wieght: did you mean data.extra.weight?")
    tables["data"] = {"train": [], "parts": [{"paths": ["a"]}, {"paths": "b"}]}
    assert error_of(tables).endswith('data.parts.1.paths: expected a list of texts, got "b"')
    tables["data"] = {"train": [], "sources": {"a": 3}}
    assert error_of(tables).endswith("data.sources.a: expected a table, got 3")


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
        ({"steps": 0}, "training.steps: 0 must be at least 1"),
        ({"clip": 1}, "training.clip: 1 must be at least 0 and below 1"),
        ({"clip": -0.5}, "training.clip: -0.5 must be at least 0 and below 1"),
        ({"group": 7}, "training.group: 7 must be at least 2 and a multiple of 2"),
        ({"limit": 0}, "training.limit: 0 must be at least 1"),
        ({"limit": "many"}, 'training.limit: expected a whole number, got "many"'),
        ({"betas": [1, 2, 3]}, "training.betas: give two numbers"),
        ({"zzz": 1, "lr": "fast"}, "unknown key training.zzz"),  # it may explain what else is wrong
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
    assert "data.train: missing: add train = … (a list of texts) under [data]" in error_of({"name": "x"})


def random_text(rng: random.Random) -> str:
    alphabet = "aé漢🙂\"'\\\n\r\t\b\f\x00\x1f\x7f\x85\u2028 #=[]{}.,$\ud7ff\ue000"
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(12)))


def random_float(rng: random.Random) -> float:
    fixed = [0.0, -0.0, 1e-05, 1e-08, 1e16, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 3.0]
    return rng.choice([*fixed, rng.uniform(-1, 1) * 10.0 ** rng.randrange(-300, 300)])


def random_source(rng: random.Random) -> Text:
    return Text(paths=[random_text(rng) for _ in range(rng.randrange(3))], weight=abs(random_float(rng)) or 1.0)


def random_config(rng: random.Random) -> Run:
    names = [random_text(rng) for _ in range(3)]
    return Run(
        name=random_text(rng),
        data=Data(
            train=rng.choice([list(names), []]),
            sources={name: random_source(rng) for name in names[: rng.randrange(4)]},
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
        text = to_toml(config)
        again = from_dict(Run, parse_toml(text))
        assert tomllib.loads(text) == config.model_dump(exclude_none=True)
        assert again == config
        assert type(again.training.warmup) is type(config.training.warmup)
        assert to_toml(again) == to_toml(config)


def test_text_of_a_config() -> None:
    sources = {"my books": Text(paths=["a"])}
    config = Run(name='say "é"', data=Data(train=[], sources=sources), training=Training(lr=1e-5, betas=[], seq_len=9))
    assert to_toml(config) == (
        'name = "say \\"é\\""\n\n'
        "[data]\ntrain = []\nkinds = []\nparts = []\n\n"
        '[data.sources."my books"]\npaths = [\n    "a",\n]\nweight = 1.0\n\n[data.weights]\n\n'
        '[training]\nlr = 1e-05\nsteps = 10\ncompile = false\nschedule = "cosine"\ntokens = "16M"\nwarmup = 0.02\n'
        "betas = []\nseq_len = 9\nclip = 0.5\ngroup = 32\n"
    )


def test_constructed_in_python_it_is_as_strict() -> None:
    with pytest.raises(UserError, match=r'^lr: expected a number, got "fast"$'):
        Training(lr="fast")
    with pytest.raises(UserError, match=r"^unknown key learning_rate: did you mean lr\?$"):
        Training(learning_rate=1.0)
    with pytest.raises(UserError, match=r"^betas: give two numbers$"):
        Training(betas=[0.1, 0.2, 0.3])
    with pytest.raises(UserError, match=r"^paths: missing: add paths = … \(a list of texts\) at the top$"):
        Text()
    with pytest.raises(UserError, match=r"^training\.steps: 0 must be at least 1$"):
        Run(name="x", data={"train": []}, training={"steps": 0})


def test_values_that_toml_cannot_hold(tmp_path: Path) -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(UserError, match=r"^lr: expected a finite number"):
            Training(lr=value)
    path = tmp_path / "saved.toml"
    with pytest.raises(UserError, match=r"name = .*x\\udc80.* is not valid Unicode: rename it$") as caught:
        write_toml(Run(name="x\udc80", data=Data(train=["y"] * 99)), path)
    assert len(str(caught.value)) < 100 and not path.exists()
    with pytest.raises(UserError, match=r'"b\\udc80",\' is not valid Unicode: rename it$'):
        write_toml(Run(name="x", data=Data(train=["a", "b\udc80"])), path)


def test_field_docstrings_are_descriptions() -> None:
    fields = dict(iter_fields(Run))
    assert fields["training", "lr"].description == "Peak learning rate."
    assert fields["training", "steps"].description == "Optimizer steps,\nin all."
    assert fields["name",].description is None
    assert ("data", "sources", "NAME", "weight") in fields and ("data", "extra", "paths") in fields
    assert ("data", "weights") in fields and ("training",) not in fields


@pytest.mark.parametrize(
    ("annotation", "words", "in_a_sentence"),
    [
        (str, "text", "text"),
        (int | None, "whole number", "a whole number"),
        (str | int, "text or whole number", "text or a whole number"),
        (bool, "true or false", "true or false"),
        (list[float], "list of number", "a list of numbers"),
        (list[str] | None, "list of text", "a list of texts"),
        (Literal["a", "b"], '"a", "b"', '"a" or "b"'),
        (Annotated[float, Field(ge=0)] | None, "number", "a number"),
        (dict[str, float], "table", "a table"),
        (Training, "table", "a table"),
    ],
)
def test_types_in_words(annotation: Any, words: str, in_a_sentence: str) -> None:
    assert describe_type(annotation) == words
    assert describe_type(annotation, article=True) == in_a_sentence


@takes(Training, but=["seq_len"])
def train(model: str, *, config: Training, device: str = "cpu") -> tuple[str, Training, str]:
    """Train."""
    return model, config, device


def test_a_function_that_takes_a_config_takes_its_fields() -> None:
    assert train("m", lr=2.0, steps=3) == ("m", Training(lr=2.0, steps=3), "cpu")
    assert train("m", config=Training(seq_len=9), device="cuda") == ("m", Training(seq_len=9), "cuda")
    with pytest.raises(UserError, match=r"^lr: cannot be combined with config: set it there$"):
        train("m", config=Training(), lr=2.0)
    with pytest.raises(UserError, match=r"^steps: 0 must be at least 1$"):
        train("m", steps=0)
    with pytest.raises(TypeError, match="seq_len"):
        train("m", seq_len=9)
    with pytest.raises(TypeError, match="learning_rate"):
        train("m", learning_rate=1.0)
    signature = inspect.signature(train)
    fields = [name for name in Training.model_fields if name != "seq_len"]
    assert list(signature.parameters) == ["model", "device", *fields] and train.__doc__ == "Train."
    for name, parameter in list(signature.parameters.items())[2:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default == default_of(Training, name)
        assert parameter.annotation == Training.model_fields[name].annotation
    assert default_of(Text, "paths") is inspect.Parameter.empty


def test_errors_in_a_section_name_it() -> None:
    for text in ("lr 3: is wrong", "lr: is wrong"):
        with pytest.raises(UserError, match=rf"^training\.{text}$"), in_section("training", Training):
            raise UserError(text)
    for text in ("other: is wrong", "training.lr: is wrong", "lrs: is wrong"):
        with pytest.raises(UserError, match=rf"^{text}$"), in_section("training", Training):
            raise UserError(text)
    with pytest.raises(KeyError), in_section("training", Training):
        raise KeyError("lr")


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
    assert overridden('data.sources={books={paths=["b"]}}').data.sources == {"books": Text(paths=["b"])}
    assert overridden("data.parts=[{paths=['b']}]").data.parts == [Text(paths=["b"])]
    assert overridden("training.limit=3").training.limit == 3
    assert overridden("training.limit=3", "training.limit=none").training.limit is None
    assert overridden('data.weights."a.b"=1').data.weights == {"a.b": 1.0}
    assert overridden("data.cache=here", "data.cache=none").data.cache is None
    assert overridden("name=none").name == "none"
    assert overridden("data.kinds=a,b", "data.kinds=none").data.kinds == Data(train=[]).kinds == []
    assert MINIMAL == {"name": "x", "data": {"train": ["a.txt"]}}


def test_overrides_of_a_table_may_be_partial() -> None:
    data = {"name": "x", "data": {"train": [], "sources": {"books": {"paths": ["b"]}}}}
    merged = apply_overrides(data, ["data.sources.books.weight=0.5", "data.extra={weight=2}"], Run)
    assert merged["data"]["sources"]["books"] == {"paths": ["b"], "weight": 0.5}
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
        ("training.steps=0", "training.steps: 0 must be at least 1"),
        ("training.limit=0", "training.limit: 0 must be at least 1"),
        ("training.lr=none", 'training.lr: expected a number, got "none"'),
        ("data.sources.a.weight=0", "data.sources.a.weight: 0 must be above 0"),
        ("data.sources.a.wieght=1", "unknown key data.sources.a.wieght: did you mean data.sources.a.weight?"),
    ],
)
def test_wrong_overrides_name_themselves(override: str, message: str) -> None:
    assert override_error(override).startswith(f"override {override}: {message}")


def test_one_value_from_text() -> None:
    assert value_from_text(Training, ("lr",), "3e-4") == 3e-4
    assert value_from_text(Training, ("tokens",), "64k") == "64k"
    assert value_from_text(Data, ("kinds",), "a, b") == ["a", "b"]
    assert value_from_text(Training, ("limit",), "none") is None
    with pytest.raises(UserError, match=r"^unknown key stpes: did you mean steps\?$"):
        value_from_text(Training, ("stpes",), "3")


def test_override_below_a_value_that_is_no_table() -> None:
    with pytest.raises(UserError, match=r"training: expected a table, got 3"):
        apply_overrides({"training": 3}, ["training.lr=1"], Run)


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
    write_toml(config, path)
    assert from_dict(Run, read_toml(path)) == config

    def disk_full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(NotWritten, match="No space"):
        write_toml(overridden("name=second"), path)
    assert from_dict(Run, read_toml(path)) == config
    assert [file.name for file in tmp_path.iterdir()] == ["saved.toml"]
