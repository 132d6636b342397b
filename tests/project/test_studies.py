"""The training studies on a tiny model: what a row records, what a second call does, stopping at the budget."""

from __future__ import annotations

import json
import lzma
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import dwindle
from chats import chat_directory, tiny_chats, write_rows
from dwindle.core.errors import UserError
from dwindle.data.text_windows import validation_windows
from dwindle.data.token_files import open_token_files
from dwindle.evaluation.sampling import Decoded
from dwindle.pruning.methods import METHODS
from dwindle.training.loss import evaluate_loss
from tiny import tiny_directory

STUDIES = Path(__file__).resolve().parents[2] / "studies"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that calls ``main_table`` with more options, and gives the rows of its file."""
    monkeypatch.syspath_prepend(str(STUDIES))
    tiny_directory(tmp_path / "model")
    import common
    import main_table

    settings = ["data.seq_len=24", "training.tokens_per_step=96", "training.lr=3e-3", "data.valid_tokens=240"]

    def call(*words: str, table: Any = main_table) -> list[dict[str, Any]]:
        options = ["--model", str(tmp_path / "model"), "--data", "pydoc:train", "--valid", "pydoc:valid"]
        options += ["--tokens", "1152", "--valid-tokens", "480", "--sequences", "4", "--out", str(tmp_path / "o.json")]
        monkeypatch.setattr(sys, "argv", ["main_table.py", *options, *words, "--set", *settings])
        common.run_study("main_table", "", table.ROWS, {})
        found: list[dict[str, Any]] = json.loads((tmp_path / "o.json").read_text())["rows"]
        return found

    return call


def training_flops(model: Path, row: dict[str, Any]) -> int:
    """Per token: 6 for each weight but those that are looked up, 12 for each channel of a head and token attended."""
    config, shape = dwindle.load(model).model.config, row["shape"]
    heads = sum(sum(queries) for queries, _ in shape["layers"])
    looked_up = config.vocab_size * shape["hidden"]
    return int(6 * (row["parameters"] - looked_up) + 12 * heads * config.head_dim * 24)


def test_rows_are_made_once(study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("--rows", "source,scratch,aware-a+kd", "--sizes", "80%,60%")
    rows = study(*wanted)
    assert [(r["row"], r["size"]) for r in rows] == [
        ("source", ""),
        ("scratch", "80%"),
        ("aware-a+kd", "80%"),
        ("scratch", "60%"),
        ("aware-a+kd", "60%"),
    ]
    lines = capsys.readouterr().out.rstrip().splitlines()[-5:]
    assert [line.split(" | ")[0] for line in lines] == ["| 100%", "| 80%", "| 80%", "| 60%", "| 60%"]
    assert lines[1].startswith("| 80% | pruning-aware A, distilled (weight=0.5)")
    assert rows[1]["flops"] == rows[1]["tokens"] * training_flops(tmp_path / "model", rows[1])
    teacher = training_flops(tmp_path / "model", rows[0]) / 3
    assert rows[2]["flops"] > rows[2]["tokens"] * (training_flops(tmp_path / "model", rows[2]) + teacher)
    for found in rows:
        assert {"command", "commit", "seed", "tokens", "parameters", "textbooks", "seconds", "settings"} <= found.keys()
        assert str(tmp_path) not in json.dumps(found)
    sizes = {r["size"]: r["parameters"] for r in rows if r["row"] == "scratch"}
    assert sizes["60%"] < sizes["80%"] < rows[0]["parameters"] == 37408
    assert rows[1]["tokens"] == 1152 and rows[2]["target_reached"]
    logs = next((tmp_path / "o-runs").glob("aware-a+kd-60*"))
    assert {"ledger.jsonl", "metrics.jsonl", "recipe.toml"} <= {path.name for path in logs.iterdir()}
    assert "distill_loss" in (logs / "metrics.jsonl").read_text()

    loaded = dwindle.load(next((tmp_path / "o").glob("aware-a+kd-60*")) / "model")
    windows = validation_windows(["pydoc:valid"], loaded.tokenizer, 24, 480)
    assert rows[4]["textbooks"] == pytest.approx(evaluate_loss(loaded.model, windows), rel=1e-5)

    before = (tmp_path / "o.json").stat().st_mtime_ns
    assert study(*wanted) == rows and (tmp_path / "o.json").stat().st_mtime_ns == before


def test_peers_are_pruned_once_and_trained_alike(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peers

    others = METHODS.keys() - {"efficientllm", "uniform"}  # ours, and adapt's control
    trained_only = {name for name in others if not METHODS[name].without_training}
    assert others - trained_only | {"one-shot", "ours"} <= set(peers.GROUPS["pruned"]) <= peers.ROWS.keys()
    assert {f"{name}-trained+kd" for name in others | {"ours"}} <= set(peers.GROUPS["trained"])
    assert {name for name, row in peers.ROWS.items() if row.rounds == 8 and not row.trained} == {
        "llm-pruner",
        "minitron",
        "ours-zscore",
        *peers.OURS_AT_ONCE,
    }
    rows = study("--rows", "flap,flap-trained+kd,ours-trained+kd", "--sizes", "60%", table=peers)
    assert [r["row"] for r in rows] == ["flap", "flap-trained+kd", "ours-trained+kd"]
    assert rows[0]["pruning"] == rows[1]["pruning"] and rows[0]["pruning"]["seconds"] >= 0  # the same model
    assert rows[0]["shape"] == rows[1]["shape"] and rows[0]["shape"]["output_bias"] and rows[0]["tokens"] == 0
    assert len(list((tmp_path / "o").glob("one-shot-*/model.safetensors"))) == 1
    assert rows[1]["parameters"] == rows[0]["parameters"] <= int(0.6 * 37408)


def test_all_peers_are_pruned_with_every_seed_and_one_that_cannot_is_a_row(study: Any, tmp_path: Path) -> None:
    import peers

    names = [name for name in peers.METHOD_ROWS if name not in ("adapt", "ours-32")]  # 50 rounds; too small
    rows = {r["row"]: r for r in study("--rows", ",".join(["source", *names]), "--sizes", "70%", table=peers)}
    assert list(rows) == ["source", *names] and rows["shortgpt"]["shape"]["layers"] != rows["source"]["shape"]["layers"]
    assert {name for name, row in rows.items() if "refused" in row} == set()
    assert all(row["parameters"] <= 0.7 * 37408 for name, row in rows.items() if name != "source")
    hidden, own_head = rows["slicegpt"]["shape"]["hidden"], rows["slicegpt"]["shape"]["own_head"]
    embedding = rows["source"]["parameters"] - rows["source"]["non_embedding"]
    both = (
        embedding // rows["source"]["shape"]["hidden"] * hidden * (1 + own_head - rows["source"]["shape"]["own_head"])
    )
    assert rows["slicegpt"]["non_embedding"] == rows["slicegpt"]["parameters"] - both

    found = study("--rows", "source,flap,shortgpt", "--sizes", "20%", "--seeds", "0,1", table=peers)[len(rows) :]
    assert [(r["row"], r["seed"]) for r in found] == [(name, n) for n in (0, 1) for name in ("flap", "shortgpt")]
    assert all("smallest model that method" in r["refused"] for r in found)
    seeds = [r for r in study("--rows", "flap", "--sizes", "70%", "--seeds", "1", table=peers) if r["row"] == "flap"]
    first, second = (r for r in seeds if r["size"] == "70%")
    assert first["seed"] == 0 and second["seed"] == 1 and first["textbooks"] != second["textbooks"]


def test_a_mistake_of_all_rows_does_not_become_a_refused_one(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import peers

    def broken(*_: object, **__: object) -> None:
        raise UserError("--data: no text")

    monkeypatch.setattr(dwindle, "prune", broken)
    with pytest.raises(SystemExit):
        study("--rows", "flap", "--sizes", "70%", table=peers)


def test_masks_that_are_not_at_the_shape_are_recorded(study: Any, tmp_path: Path) -> None:
    import peers
    import tables

    [row] = study("--rows", "sheared-trained", "--sizes", "70%", table=peers)
    [run] = (tmp_path / "o").glob("sheared-trained*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "open_ffn" in line][-1]
    for kind, one in row["open_masks"].items():
        assert one["expected"] == pytest.approx(last[f"open_{kind}"], abs=1e-4)
    assert row["open_masks"]["stem"]["shape"] == round(row["shape"]["hidden"] / 32, 4)
    assert f"FFN {row['open_masks']['ffn']['expected']:.2f} (shape " in tables.peers({"rows": [row]})


def test_a_run_that_does_not_fit_the_budget_goes_on_later(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dwindle.training.loop import Trainer

    study("--rows", "source")
    original = Trainer.update

    def update(self: Trainer, grad_norm: torch.Tensor, healthy: bool, *, clip: bool) -> float:
        if self.step == 5:
            self.stop.request()  # what the alarm does
        return original(self, grad_norm, healthy, clip=clip)

    monkeypatch.setattr(Trainer, "update", update)
    with pytest.raises(SystemExit) as caught:
        study("--rows", "aware-a")
    assert caught.value.code == 143 and "call again" in capsys.readouterr().out
    assert [r["row"] for r in json.loads((tmp_path / "o.json").read_text())["rows"]] == ["source"]
    monkeypatch.setattr(Trainer, "update", original)
    rows = study("--rows", "aware-a,adapt")
    assert [r["row"] for r in rows] == ["source", "aware-a", "adapt"]
    lines = (next((tmp_path / "o-runs").glob("aware-a*")) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    assert "prune.interleaves" in rows[2]["refused"]  # 20 stages in 12 steps


def test_mistakes_are_told_before_anything_is_trained(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (("--rows", "source,oneshot"), "error: --rows: 'oneshot' is not one of source, "),
        (("--rows", "aware-a", "--wikitext", "missing.txt"), "error: --wikitext: missing.txt does not exist"),
        (("--rows", "aware-a", "--tokens", "40"), "error: training.tokens: 40 is below one step"),
    ):
        with pytest.raises(SystemExit) as caught:
            study(*words)
        assert caught.value.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert not (tmp_path / "o.json").exists()


def test_a_row_is_made_again_only_where_something_is_missing(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure after the training costs no training, a text that comes later only its loss; other data are a row."""
    import common

    def lost(*_: object, **__: object) -> float:
        raise RuntimeError

    with monkeypatch.context() as broken:
        broken.setattr(common, "evaluate_loss", lost)
        with pytest.raises(RuntimeError):
            study("--rows", "aware-a")
    [run] = (tmp_path / "o").glob("aware-a*")
    steps = (run / "metrics.jsonl").read_bytes()  # with the times of its steps
    [row] = study("--rows", "aware-a")
    assert (run / "metrics.jsonl").read_bytes() == steps and not (run / "checkpoints").exists()
    text = tmp_path / "more.txt"
    text.write_text("a text of a few words. " * 40)
    [again] = study("--rows", "aware-a", "--wikitext", str(text))
    assert again == row | {"wikitext2": again["wikitext2"]} and again["wikitext2"] != row["textbooks"]
    text.write_text("other words, to learn from. " * 400)
    assert [r["data"] for r in study("--rows", "aware-a", "--data", str(text))] == ["pydoc:train", "more.txt"]


def test_files_of_several_machines_become_one(study: Any, tmp_path: Path) -> None:
    """A row that was made twice is there twice, once a repeat; merging again adds nothing, a study goes on with it."""
    import common
    import main_table
    import merge

    rows = study("--rows", "source,aware-a")
    content = json.loads((tmp_path / "o.json").read_text())
    again = rows[1] | {"textbooks": rows[1]["textbooks"] + 0.5, "wikitext2": 9.0}
    for name, found in (("one", [again, rows[0]]), ("two", [again | {"wikitext2": 8.0}, rows[1] | {"seed": 7}])):
        (tmp_path / f"{name}.json").write_text(json.dumps(content | {"rows": found}))
    others = [tmp_path / "one.json", tmp_path / "two.json"]
    assert merge.merge(tmp_path / "o.json", others).endswith("5 rows, 3 of them new (2 repeats)")
    expected = [*rows, again | {"repeat": 1}, again | {"wikitext2": 8.0, "repeat": 2}, rows[1] | {"seed": 7}]
    assert json.loads((tmp_path / "o.json").read_text())["rows"] == expected
    assert merge.merge(tmp_path / "o.json", others).endswith("5 rows, 0 of them new (0 repeats)")

    # the repeat has the second text, so nothing is left to do; what is saved of a repeat takes its own place
    text = tmp_path / "more.txt"
    text.write_text("a text of a few words. " * 40)
    assert study("--rows", "aware-a", "--wikitext", str(text)) == expected
    args = common.arguments("", main_table.ROWS)
    common.Study("main_table", args, main_table.ROWS)._save(expected[3] | {"average": 1.0})
    found = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert found == [*expected[:3], expected[3] | {"average": 1.0}, expected[4]]
    (tmp_path / "two.json").write_text(json.dumps(content | {"study": "other"}))
    with pytest.raises(UserError, match=r"two\.json: of another study"):
        merge.merge(tmp_path / "o.json", others)
    with pytest.raises(UserError, match=r"none\.json: not a study's"):
        merge.merge(tmp_path / "o.json", [tmp_path / "none.json"])


def test_rows_of_several_processes_end_in_one_file(study: Any, tmp_path: Path) -> None:
    """A study that was begun before another one saved a row keeps that row, and replaces only its own."""
    import common
    import main_table

    study("--rows", "source")
    args = common.arguments("", main_table.ROWS)
    early, late = (common.Study("main_table", args, main_table.ROWS) for _ in range(2))
    places = [(seed, size, row) for seed in (0, 1) for size in ("80%", "60%") for row in ("source", "aware-a")]
    assert [place for place in early.missing(places) if place[2] == "source"] == []
    assert len(early.missing([(0, "80%", "source-trained"), (0, "60%", "source-trained")])) == 1
    records = [study_.content["rows"][0] | {"row": name, "size": "60%"} for study_, name in ((early, "a"), (late, "b"))]
    for one, record in ((early, records[0]), (late, records[1]), (early, records[0] | {"tasks": {}})):
        one._save(record)
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [(r["row"], "tasks" in r) for r in rows] == [("source", False), ("a", True), ("b", False)]

    def save(one: Any, name: str) -> None:
        for number in range(20):
            one._save(records[0] | {"row": name, "seed": number})

    writers = [get_context("fork").Process(target=save, args=pair) for pair in ((early, "c"), (late, "d"))]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert sorted((r["row"], r["seed"]) for r in rows[3:]) == [(name, n) for name in "cd" for n in range(20)]


def test_jobs(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each place is one process of the same command; a failure is shown and the others still run."""
    import jobs

    script = tmp_path / "fake.py"
    script.write_text(
        "import json, sys\n"
        "print('progress')\n"
        "print(json.dumps({'words': sys.argv[1:]})) if 'bad' not in sys.argv else sys.exit('no such row')\n"
        "sys.exit(143 if 'late' in sys.argv else 0)\n"
    )
    monkeypatch.setattr(sys, "argv", [str(script), "--rows", "all", "--set", "a=1"])
    places = [(0, "50%", "bad"), (0, "50%", "good"), (1, "30%", "good")]
    assert jobs.run_jobs(places, 2, lambda: 100.0, tmp_path / "logs") == jobs.Outcome(failed=1)
    printed = capsys.readouterr().out
    assert "bad 50% 0: failed with 1" in printed and "no such row" in printed and printed.count('{"words"') == 2
    last = json.loads(printed.splitlines()[-1])["words"]
    assert last[4:] == ["--rows", "good", "--sizes", "30%", "--seeds", "1", "--budget", "100", "--jobs", "1"]
    assert jobs.run_jobs(places[1:], 2, lambda: 100.0, tmp_path / "logs") == jobs.Outcome()
    assert jobs.run_jobs(places[1:], 2, lambda: 0.0, tmp_path / "logs") == jobs.Outcome(out_of_time=True)
    assert jobs.run_jobs([(0, "50%", "late")], 1, lambda: 9.0, tmp_path / "logs") == jobs.Outcome(out_of_time=True)


def test_a_campaign_runs_what_it_can_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job waits for those it needs; one that fails takes only those with it; what ended is not run again."""
    monkeypatch.syspath_prepend(str(STUDIES))
    import campaign

    order = tmp_path / "order"
    jobs = [
        campaign.Job("late", f"echo late >> {order}", ("early", "asked")),
        campaign.Job("early", f"python -c 'print(1)' >> {order}"),
        campaign.Job("asked", f"echo asked >> {order}", ("early",), "ask"),
        campaign.Job("bad", f"test -e {tmp_path}/there || (echo no input; false)"),
        campaign.Job("lost", f"echo lost >> {order}", ("bad",)),
    ]
    most: dict[Any, int] = {"train": 1, "ask": 1}
    assert campaign.run(jobs, tmp_path / "work", most).failed == {"bad"}
    assert order.read_text().split() == ["1", "asked", "late"]
    assert "bad: failed with 1\n  no input" in capsys.readouterr().out
    (tmp_path / "there").touch()
    assert campaign.run(jobs, tmp_path / "work", most).failed == set()
    assert order.read_text().split() == ["1", "asked", "late", "lost"]
    assert [job.name for job in campaign.needed(jobs, "late")] == ["late", "early", "asked"]


def test_a_campaign_ends_with_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs saves itself and goes on in the next call; what would not end in time, by a job like it, waits."""
    monkeypatch.syspath_prepend(str(STUDIES))
    import campaign

    (tmp_path / "slow.py").write_text(
        "import pathlib, signal, sys, time\n"
        "saved = pathlib.Path(__file__).with_name('saved')\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit((time.sleep(0.5), saved.touch(), 143)[-1]))\n"
        "saved.with_name('begun').touch()\n"
        "time.sleep(0 if saved.exists() else 600)\n"
    )
    begun = tmp_path / "begun"
    slow = campaign.Job("slow", f"python {tmp_path}/slow.py one && touch {tmp_path}/after")
    jobs = [
        slow,
        campaign.Job("twice", "python -c '' 2", kind="ask", amount=2),
        campaign.Job("often", "python -c '' 99", kind="ask", amount=99),
        campaign.Job("once", "python -c '' 1", kind="ask"),
    ]
    work, most = tmp_path / "work", dict[Any, int](train=1, ask=1)
    work.mkdir()
    (work / "campaign.json").write_text(json.dumps({"ended": {"once": campaign.START_S + 30}, "spent": {}}))
    clock = campaign.time.monotonic
    started = clock()
    # 500 seconds are left until the slow job runs, and none from then on
    monkeypatch.setattr(campaign.time, "monotonic", lambda: clock() + (600 if begun.exists() else 0))
    progress = campaign.run(jobs, work, most, 500.0)
    assert (progress.stopped, set(progress.ended)) == ({"slow"}, {"once", "twice"}) and clock() < started + 60
    assert (tmp_path / "saved").exists() and not (tmp_path / "after").exists()
    monkeypatch.undo()
    progress = campaign.run(jobs, work, most)
    assert set(progress.ended) == {"slow", "twice", "often", "once"} and (tmp_path / "after").exists()
    assert progress.ended["slow"] > progress.spent["slow"]


def test_a_campaign_leaves_out_what_docs_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with all its texts is not made again, unless another job needs its model or it is asked for by name."""
    monkeypatch.syspath_prepend(str(STUDIES))
    import campaign

    content = json.loads((campaign.RESULTS / "ladder.json").read_text())
    for row in content["rows"]:
        if (row["row"], row["size"], row["seed"]) == (campaign.BY_HAND, "30%nonemb", 1):
            del row["marketing"]
    (tmp_path / "ladder.json").write_text(json.dumps(content))
    jobs = campaign.ladder(campaign.Places(Path("in"), Path("work"), Path("out")))
    known = campaign.published(jobs, tmp_path)
    names = {f"{row}-{size}-{seed}" for row in ("shot", "muon") for size in (50, 30) for seed in range(3)}
    assert known == names - {"shot-30-1"}
    left = [job.name for job in campaign.needed(jobs, "", known | {"adapt-0"})]
    assert "adapt-0" in left and "shot-50-0" not in left and "shot-30-1" in left
    assert [job.name for job in campaign.needed(jobs, "shot-50-0", known)] == ["shot-50-0"]
    ranked = [
        job.name for job in campaign.needed([*campaign.peers(campaign.Places(tmp_path, tmp_path, tmp_path)), *jobs], "")
    ]
    order = ["peers-ours-zscore-while-trained-50-0", "adapt-0", "peers-flap-80-0", "peers-flap-50-1"]
    assert sorted(order, key=ranked.index) == order


def test_inputs_of_a_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> None:
    """All that its jobs name is made, and only what is missing when it is called again."""
    monkeypatch.syspath_prepend(str(STUDIES))
    import campaign_inputs
    import mixture

    corpus, model = tmp_path / "corpus", shared_data / "models" / "stories260K" / "stories260K.bin"
    corpus.mkdir()
    for name in {file for files, _ in mixture.PARTS.values() for file in files}:
        write_xz(corpus / f"{name}.train.jsonl.xz", [{"text": f"{name} {number}"} for number in range(10)])
    write_xz(corpus / "textbooks.valid.jsonl.xz", [{"text": "a", "book": "psychology"}, {"text": "b", "book": "m"}])
    for name in mixture.HELD_OUT:
        write_xz(corpus / f"{name}.jsonl.xz", [{"text": name}])
    (corpus / "wikitext-2-raw.test.txt").write_text("Once upon a time")
    words = [str(corpus), "--model", str(model), "--second", str(model), "--out", str(tmp_path / "inputs")]
    words += ["--eval", str(shared_data / "eval"), "--instruct", str(shared_data / "instruct")]
    parts = {name: (files, 60) for name, (files, _) in mixture.PARTS.items()}  # "mdn 0" has five characters
    monkeypatch.setattr(mixture, "PARTS", parts | {"mdn": (["mdn"], 25)})
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["campaign_inputs.py", *words])
        campaign_inputs.main()
    made = campaign_inputs.Places(tmp_path / "inputs", tmp_path, tmp_path)
    first, second, more = map(open_token_files, (made.tokens / "mdn", made.second_tokens / "mdn", made.tokens / "more"))
    assert (first.num_documents, second.num_documents) == (5, 3) and more.num_documents >= 5
    assert made.source.read_bytes() == made.second.read_bytes() == model.read_bytes()
    assert {"wikitext2", "more", "psychology", "marketing"} <= {path.name for path in made.tokens.iterdir()}
    assert len(list((tmp_path / "inputs" / "prompts").iterdir())) == 3


def write_xz(path: Path, rows: list[dict[str, str]]) -> None:
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["ladder", "thirty", "tuning", "second-model", "peers"])
def test_campaigns_are_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job has a name of its own, needs only jobs that are there, and its command is one that the study takes."""
    monkeypatch.syspath_prepend(str(STUDIES))
    import campaign
    import ladder

    jobs = campaign.CAMPAIGNS[name](campaign.Places(Path("in"), Path("work"), Path("out")))
    names = {job.name for job in jobs}
    assert len(names) == len(jobs) and all(set(job.after) <= names for job in jobs)
    for job in jobs:
        words = job.command.split()
        if "studies/ladder.py" in words:
            assert words[words.index("--rows") + 1].partition("@")[0].removesuffix("+kd") in ladder.ROWS


def test_a_model_asks_itself_is_tuned_on_its_answers_and_agrees_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the tuning study after one another, on a tiny chat model whose turns end at once."""
    monkeypatch.syspath_prepend(str(STUDIES))
    import tune

    model = chat_directory(tmp_path / "model")
    tokenizer = dwindle.load(model).tokenizer

    def call(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["tune.py", *map(str, words)])
        tune.main()
        return capsys.readouterr().out

    asked: list[list[int]] = []

    def ended(_: Any, rows: Any, how: Any, *, count: int, ends: Any, keys: Any, droppable: bool) -> list[Decoded]:
        asked.extend(rows)
        texts = [tokenizer("abc"[key[0] % 3], add_special_tokens=False)["input_ids"] for key in keys]
        return [Decoded(ids, is_finished=key[0] % 4 != 3) for ids, key in zip(texts, keys, strict=True)]

    monkeypatch.setattr(tune, "decode", ended)
    call("ask", model, "--count", 3, "--out", tmp_path / "prompts.jsonl")
    assert tokenizer.decode(asked[0]).rstrip().endswith("user"), "the turn of the user is begun, and empty"
    prompts = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in prompts] == [0, 1, 2] and len({row["prompt"] for row in prompts}) == 3

    chats = [row | {"split": split} for row, split in zip(tiny_chats(6), ["train", "test"] * 3, strict=True)]
    silent = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " "}]}
    rows = write_rows(tmp_path / "chats.jsonl", [*chats, tiny_chats(7)[-1] | {"finished": False}, silent])
    assert "chats: 4 examples" in call("render", model, "--chat", f"chats={rows}", "--out", tmp_path / "tokens")

    words = ("run", f"half={model}", "--teacher", model, "--chat", tmp_path / "tokens/chats", "--text", "pydoc:valid")
    words += ("--tune", 512, "--work", tmp_path / "work", "--out", tmp_path / "tune.json", "--set", "data.seq_len=64")
    words += ("training.tokens_per_step=128", "distill.weight=0.5")
    call(*words)
    call(*words)  # what is done is not done again
    (record,) = json.loads((tmp_path / "tune.json").read_text())
    assert (record["row"], record["seed"], record["tokens"]) == ("half", 0, 512)

    (tmp_path / "p.jsonl").write_text(json.dumps({"id": 1, "prompt": "a b"}) + "\n")
    (tmp_path / "q.jsonl").write_text(json.dumps({"question_id": 1, "text": "b"}) + "\n")
    files = [tmp_path / "p.jsonl", tmp_path / "q.jsonl"]
    call("answer", model, "--to", *files, "--tokens", 5, "--out", tmp_path / "answers")
    answered = [json.loads((tmp_path / "answers" / file.name).read_text()) for file in files]
    assert [(row["id"], row["messages"][0]["content"]) for row in answered] == [(1, "a b"), (1, "b")]
    same = call("agree", tmp_path / "work/half-0", "--source", tmp_path / "work/half-0/model",
                "--answers", tmp_path / "answers/p.jsonl")  # fmt: skip
    assert json.loads(same)["agreement"] == 1.0
    call("teach", model, "--prompts", tmp_path / "p.jsonl", "--tokens", 3, "--out", tmp_path / "taught.jsonl")
    assert json.loads((tmp_path / "taught.jsonl").read_text())["id"] == 1
