"""Generated tasks and few-shot MMLU: prompts and scores against lm-evaluation-harness itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the eval extra (lm_eval)")
pytest.importorskip("immutabledict", reason="needs the eval extra (immutabledict)")

from dwindle.core.errors import UserError
from dwindle.evaluation import ifeval
from dwindle.evaluation.evaluate import evaluate, evaluate_model, load_data
from dwindle.evaluation.generation_tasks import GENERATION_TASKS, load_generation, score_answers
from dwindle.evaluation.harness import import_harness, stock_tasks
from dwindle.evaluation.prompts import read_chats
from dwindle.evaluation.results import read_result
from tiny import tiny_directory, tiny_model, tiny_tokenizer

SOME = [
    {"key": 1, "prompt": "Write two lines without commas.", "instruction_id_list": ["punctuation:no_comma"],
     "kwargs": [{}]},
    {"key": 2, "prompt": "Say hello, in 3 bullet points, with the word ice.",
     "instruction_id_list": ["detectable_format:number_bullet_lists", "keywords:existence"],
     "kwargs": [{"num_bullets": 3}, {"keywords": ["ice"]}]},
    {"key": 3, "prompt": "Answer in German.", "instruction_id_list": ["language:response_language"],
     "kwargs": [{"language": "de"}]},
    {"key": 4, "prompt": "Few sentences, no commas.",
     "instruction_id_list": ["length_constraints:number_sentences", "punctuation:no_comma"],
     "kwargs": [{"relation": "less than", "num_sentences": 3}, {}]},
]  # fmt: skip
ANSWERS = (
    "One line\nanother",
    "Sure:\n* a\n* ice\n* b",
    "Das ist ein deutscher Satz über das Wetter.",
    "Yes. No, or so.",
)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_rows(rows: list[dict[str, Any]], texts: Any) -> list[dict[str, Any]]:
    pairs = zip(rows, texts, strict=True)
    return [{"id": row["key"], "messages": [{"role": "assistant", "content": text}]} for row, text in pairs]


def test_ifeval_scores_are_those_of_the_harness(shared_data: Path, tmp_path: Path) -> None:
    """All 541 prompts with made answers; the harness's own functions on what can be checked here."""
    file = shared_data / "instruct" / "ifeval.prompts.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    pieces = ["*hi* there.", "P.S. now", "HELLO YOU", "<<title>>", "a, b, c", '"quoted"', "* one\n* two", "ice cream"]
    texts = [
        "\n".join(
            [row["prompt"][: 7 * (number % 9)], *pieces[number % 5 : number % 5 + number % 4], "my answer is yes."]
        )
        for number, row in enumerate(rows)
    ]
    texts[3] = "  "
    answers = write_lines(tmp_path / "answers.jsonl", answer_rows(rows, texts))
    result = evaluate(answers, ["ifeval"], data=[str(file.parent)], items=tmp_path / "items.jsonl").generated[0]

    checkers = ifeval.Checkers()
    utils = checkers._utils
    flat: dict[str, list[Any]] = {name: [] for name in ifeval.LEVELS}
    whole = 0
    for row, text in zip(rows, texts, strict=True):
        if not any(name in checkers.missing for name in row["instruction_id_list"]):
            whole += 1
            random.seed(f"ifeval {row['key']}")  # the harness draws arguments that are missing
            found = utils.process_results(row, [text])
            for kind in ("strict", "loose"):
                flat[f"prompt_{kind}"].append(found[f"prompt_level_{kind}_acc"])
                flat[f"inst_{kind}"].append(found[f"inst_level_{kind}_acc"])
    assert result.num_items == 541 and whole > 450
    for kind in ("strict", "loose"):
        level = flat[f"prompt_{kind}"]
        assert result.values[f"prompt_{kind}"] == sum(level) / len(level)
    records = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    for kind in ("strict", "loose"):
        of_whole = [record[kind] for record in records if record["whole"]]
        assert of_whole == flat[f"inst_{kind}"]
        every = [one for record in records for one in record[kind]]
        assert result.values[f"inst_{kind}"] == utils.agg_inst_level_acc([every])
    assert 0 < result.values["inst_strict"] <= result.values["inst_loose"] < 1
    assert sum(result.left_out.values()) == 834 - len(every)


def test_what_cannot_be_checked_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded either."""
    without_packages(monkeypatch)
    write_lines(tmp_path / "ifeval.prompts.jsonl", SOME)
    data = load_data(["ifeval"], [str(tmp_path)]).generated[0]
    result, records = score_answers(data, {row["key"]: text for row, text in zip(SOME, ANSWERS, strict=True)})
    assert [record["strict"] for record in records] == [[True], [True, True], [], [False]]
    assert [record["whole"] for record in records] == [True, True, False, False]
    assert result.values == {"prompt_strict": 1.0, "inst_strict": 0.75, "prompt_loose": 1.0, "inst_loose": 0.75}
    assert {reason.split(" needs ")[0]: count for reason, count in result.left_out.items()} == {
        "language:response_language": 1,
        "length_constraints:number_sentences": 1,
    }


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if langdetect and NLTK's data were not there."""
    import nltk

    ifeval.Checkers()  # their module is imported once: with langdetect, where it is installed, for later tests

    def missing(*args: Any) -> None:
        raise LookupError

    find_spec = ifeval.importlib.util.find_spec
    monkeypatch.setattr(
        ifeval.importlib.util, "find_spec", lambda name: None if name == "langdetect" else find_spec(name)
    )
    monkeypatch.setattr(nltk.data, "find", missing)
    monkeypatch.setattr(nltk, "download", lambda *args: pytest.fail("a download"))


def test_a_level_that_nothing_has_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages(monkeypatch)
    write_lines(tmp_path / "ifeval.prompts.jsonl", SOME[2:])  # no prompt can be checked whole
    result, _ = score_answers(load_data(["ifeval"], [str(tmp_path)]).generated[0], list(ANSWERS[2:]))
    assert result.values == {"inst_strict": 0.0, "inst_loose": 0.0} and result.value == 0 and result.num_items == 2
    write_lines(tmp_path / "ifeval.prompts.jsonl", SOME[2:3])
    with pytest.raises(UserError, match="no instruction can be checked here"):
        score_answers(load_data(["ifeval"], [str(tmp_path)]).generated[0], list(ANSWERS[2:3]))


def test_ids_name_one_item_each(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": name, "question": "Q?", "answer": "x"} for name in (3, "a", [1], True, None)]
    write_lines(tmp_path / "exact_match.dev.jsonl", rows)
    write_lines(tmp_path / "exact_match.test.jsonl", rows)
    data = load_generation(GENERATION_TASKS["exact_match"], [str(tmp_path)])
    assert [item.id for item in data.items] == [3, "a", 4] and data.num_skipped == 2
    assert "line 3: a field has the wrong form (the id [1] is neither" in data.skipped[0]
    write_lines(tmp_path / "exact_match.test.jsonl", [*rows, rows[1]])
    with pytest.raises(UserError, match=r"line 6: the id 'a' is also that of line 2: give each its own"):
        load_generation(GENERATION_TASKS["exact_match"], [str(tmp_path)])
    bad = write_lines(tmp_path / "bad.jsonl", [{"id": [1], "messages": [{"role": "assistant", "content": "x"}]}])
    with pytest.raises(UserError, match=r"bad.jsonl, line 1: is not an answer"):
        read_chats(bad)


def test_length_and_precision_reach_generated_answers(tmp_path: Path) -> None:
    """No sequence is longer than --max-length, autocast is on, and a long prompt does not cut its neighbours."""
    seen: list[tuple[int, bool]] = []
    model, tokenizer = tiny_model("llama", vocab_size=257, max_position_embeddings=256), tiny_tokenizer()
    model.float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id = None
    model.register_forward_pre_hook(
        lambda module, args, options: seen.append((options["input_ids"].shape[1], torch.is_autocast_enabled("cpu"))),
        with_kwargs=True,
    )
    rows = [{"question": f"Capital {n}?", "answer": f"City {n}"} for n in range(6)]
    write_lines(tmp_path / "exact_match.dev.jsonl", rows)
    write_lines(tmp_path / "exact_match.test.jsonl", rows[:2])
    data = load_data(["exact_match"], [str(tmp_path)])
    evaluate_model(model, tokenizer, data, tokens=4, max_length=60, precision="bf16")
    assert max(length for length, _ in seen) == 56 and all(is_on for _, is_on in seen)
    evaluate_model(model, tokenizer, data, tokens=4)
    assert not seen[-1][1]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    short, long = SOME[0], {**SOME[0], "key": 7, "prompt": "x" * 240}
    answers = []
    for given in ([short], [short, long]):
        write_lines(tmp_path / "ifeval.prompts.jsonl", given)
        items = tmp_path / f"{len(given)}.jsonl"
        evaluate_model(model, tokenizer, load_data(["ifeval"], [str(tmp_path)]), tokens=40, items=items)
        answers.append(json.loads(items.read_text().splitlines()[0])["answer"])
    assert answers[0] == answers[1]


def test_a_model_is_asked_and_its_answers_scored(tmp_path: Path) -> None:
    """``dwindle eval MODEL --tasks ifeval``, then the same from its answers."""
    import dwindle

    sets = write_lines(tmp_path / "sets" / "ifeval.prompts.jsonl", [*SOME, {"key": 9, "prompt": 3}]).parent
    model = tiny_directory(tmp_path / "model")
    whole = evaluate(model, ["ifeval"], data=[str(sets)], tokens=12, items=tmp_path / "items.jsonl")
    first = whole.generated[0]
    assert (first.num_items, first.num_skipped) == (4, 1) and "line 5" in first.skipped[0]
    good = write_lines(tmp_path / "prompts.jsonl", SOME)
    dwindle.generate_answers(model, good, tmp_path / "a.jsonl", tokens=12, chat=False, device="cpu")
    second = evaluate(tmp_path / "a.jsonl", ["ifeval"], data=[str(sets)])
    assert second.generated[0] == first and second.parameters == 0
    assert read_result(whole.save(tmp_path / "r.json")).generated == [first]
    with pytest.raises(UserError, match=r"piqa cannot be scored from answers|--data: piqa not found"):
        evaluate(tmp_path / "a.jsonl", ["piqa"], data=[str(sets)])
    write_lines(tmp_path / "bad.jsonl", [{"id": 1, "messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(UserError, match=r"bad.jsonl, line 1: the last message is not an answer"):
        evaluate(tmp_path / "bad.jsonl", ["ifeval"], data=[str(sets)])
    write_lines(tmp_path / "other.jsonl", answer_rows([{"key": "x"}], ["y"]))
    with pytest.raises(UserError, match="none of its 4 items has an answer"):
        evaluate(tmp_path / "other.jsonl", ["ifeval"], data=[str(sets)])
    with pytest.raises(UserError, match="generated by --engine dwindle only"):
        evaluate(model, ["ifeval"], data=[str(sets)], engine="harness")


GSM8K = [{"question": f"What is {n} + 1?", "answer": f"{n} and 1 is {n + 1}.\n#### {n + 1},000"} for n in range(8)]
GSM8K_ANSWERS = [" It is 1,000.\n#### 1,000", " so 2000", " #### 3000.", "#### 4,001", "", " $5,000 ", "#### 7000", "8"]


def test_gsm8k_is_asked_and_scored_as_in_the_harness(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k.train.jsonl", GSM8K[:6])
    write_lines(tmp_path / "gsm8k.test.jsonl", GSM8K)
    data = load_generation(GENERATION_TASKS["gsm8k"], [str(tmp_path)])
    result, records = score_answers(data, dict(enumerate(GSM8K_ANSWERS)))
    lm_eval = import_harness()
    stock = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"
    definition = {
        "include": str(stock),
        "task": "ours",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {name: str(tmp_path / f"gsm8k.{name}.jsonl") for name in ("train", "test")},
            "cache_dir": str(tmp_path / "cache"),
        },
        "fewshot_config": {"sampler": "first_n"},
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "ours.yaml").write_text(json.dumps(definition))
    task = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(tmp_path / "tasks")).load(["ours"])[
        "tasks"
    ]["ours"]
    task.build_all_requests(limit=None, rank=0, world_size=1)
    asked = {instance.doc_id: instance.args[0] for instance in task.instances}
    assert [item.prompt for item in data.items] == [asked[index] for index in range(8)]
    for instance in task.instances:
        instance.resps = [GSM8K_ANSWERS[instance.doc_id]]
    task.apply_filters()
    for mine, theirs in (("exact_match", "strict-match"), ("flexible", "flexible-extract")):
        scores = {
            instance.doc_id: task.process_results(instance.doc, [instance.filtered_resps[theirs]])["exact_match"]
            for instance in task.instances
        }
        assert [float(record[mine]) for record in records] == [scores[index] for index in range(8)], mine
    assert 0 < result.values["exact_match"] < result.values["flexible"] < 1


def test_answers_of_a_file_end_where_those_of_a_model_do(tmp_path: Path) -> None:
    """A base model goes on to a question of its own, whose number is not its answer."""
    write_lines(tmp_path / "gsm8k.train.jsonl", GSM8K[:6])
    write_lines(tmp_path / "gsm8k.test.jsonl", GSM8K[:2])
    texts = [f" It is {n + 1},000.\n\nQuestion: What is 7 + 1?\nAnswer: 8" for n in range(2)]
    rows = [{"id": n, "messages": [{"role": "assistant", "content": text}]} for n, text in enumerate(texts)]
    answers = write_lines(tmp_path / "answers.jsonl", rows)
    assert evaluate(answers, ["gsm8k"], data=[str(tmp_path)]).generated[0].values["flexible"] == 1.0


def test_instructions_with_arguments_of_others_are_skipped(tmp_path: Path) -> None:
    """Before any answer: a checker would raise when all answers are there."""
    bad = {**SOME[1], "key": 5, "kwargs": [{"num_bullets": 3}, {"words": ["ice"]}]}
    write_lines(tmp_path / "ifeval.prompts.jsonl", [SOME[0], bad])
    data = load_data(["ifeval"], [str(tmp_path)]).generated[0]
    assert [item.id for item in data.items] == [1] and data.num_skipped == 1
    assert "line 2: a field has the wrong form (arguments that its instructions do not have" in data.skipped[0]


def test_exact_match_on_a_file_of_ones_own(tmp_path: Path) -> None:
    rows = [{"question": f"Capital {n}?", "answer": f"City {n}"} for n in range(6)]
    write_lines(tmp_path / "exact_match.dev.jsonl", rows)
    write_lines(tmp_path / "exact_match.test.jsonl", rows[:3])
    data = load_generation(GENERATION_TASKS["exact_match"], [str(tmp_path)])
    shots = "".join(f"Question: Capital {n}?\nAnswer: City {n}\n\n" for n in range(5))
    assert data.items[1].prompt == f"{shots}Question: Capital 1?\nAnswer:"
    result, _ = score_answers(data, {0: " city 0.\nQuestion", 1: "Town", 2: "CITY  2!"})
    assert result.value == pytest.approx(2 / 3)
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=120)
    found = evaluate_model(model, tiny_tokenizer(), load_data(["exact_match"], [str(tmp_path)]), tokens=4)
    assert found.generated[0].num_items == 3  # the prompt is longer than the context: its beginning is cut
    write_lines(tmp_path / "exact_match.test.jsonl", [rows[0], {"question": "Which sign?", "answer": "+"}])
    data = load_generation(GENERATION_TASKS["exact_match"], [str(tmp_path)])
    assert len(data.items) == 1 and "line 2: a field has the wrong form (nothing of the answer" in data.skipped[0]
    (tmp_path / "exact_match.dev.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(UserError, match=r"example line 1 of exact_match is broken"):
        load_generation(GENERATION_TASKS["exact_match"], [str(tmp_path)])


MMLU = [
    {
        "question": f" Q {n} of {subject}? ",
        "subject": subject,
        "choices": ["a", "b b", "c", "d"],
        "answer": n % 4,
    }
    for n in range(6)
    for subject in ("high_school_physics", "virology")
]


@pytest.mark.parametrize("shared", [False, True], ids=["made-up", "real"])
def test_five_shot_mmlu_asks_and_scores_like_the_harness(
    shared: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if shared:
        folder = request.getfixturevalue("shared_data") / "eval"
    else:
        write_lines(tmp_path / "mmlu.dev.jsonl", MMLU)
        write_lines(tmp_path / "mmlu.test.jsonl", [*MMLU[:4], {**MMLU[0], "subject": "art"}])
        folder = tmp_path
    data = load_data(["mmlu_5shot"], [str(folder)], limit=5)
    task = data.tasks[0]
    assert len(task.items) == (5 if shared else 4)
    if not shared:
        assert "only 0 of 5 examples" in task.skipped[0]
    for subject in dict.fromkeys(document["subject"] for document in task.documents):
        own = [place for place, document in enumerate(task.documents) if document["subject"] == subject]
        shots = [document for document in task.shot_documents if document["subject"] == subject]
        with stock_tasks({"mmlu_5shot": [task.documents[place] for place in own]}, shots) as stock:
            stock["mmlu_5shot"].build_all_requests(limit=None, rank=0, world_size=1)
            theirs = [instance.args for instance in stock["mmlu_5shot"].instances]
        assert [one for place in own for one in task.items[place].question.requests] == theirs
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=300)
    files = [tmp_path / "dwindle.jsonl", tmp_path / "harness.jsonl"]
    for engine, file in zip(("dwindle", "harness"), files, strict=True):
        evaluate_model(model, tiny_tokenizer(), data, engine=engine, items=file)
    ours, theirs = ([json.loads(line)["loglikelihoods"] for line in file.read_text().splitlines()] for file in files)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-9)
