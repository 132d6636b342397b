"""A handful of made-up documents of every task, in the form of the hub, with the traps that real ones hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

ABCD = ["A", "B", "C", "D"]


def _arc(question: str, texts: list[str], key: str, labels: list[str] | None = None) -> dict[str, Any]:
    return {"question": question, "choices": {"text": texts, "label": labels or ABCD[: len(texts)]}, "answerKey": key}


DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "arc_easy": [
        _arc("What melts? ", ["ice", "a rock", "ice", "fire's light"], "C"),
        _arc("Which is [cold]?", ['it\'s "ice"', "sun", "fire"], "2", ["1", "2", "3"]),
        _arc("Two?", ["one", "two"], "B"),
    ],
    "arc_challenge": [_arc("Why {{x}}?", ["because", "therefore", "hence", "never"], "D")],
    "boolq": [
        {"passage": "Ice melts. ", "question": "does ice melt", "label": 1},
        {"passage": "Rock\nstays.", "question": "do rocks melt", "label": 0},
    ],
    "hellaswag": [
        {
            "activity_label": "Roof  shingle",
            "ctx_a": "A man [header] sits.",
            "ctx_b": "he IS",
            "endings": ["runs [step] away.", " sleeps [title] well", "is  up.", "goes"],
            "label": "3",
        },
        {
            "activity_label": "Tea",
            "ctx_a": "Water boils.",
            "ctx_b": "",
            "endings": ["a b", "a c", "d", "e"],
            "label": "0",
        },
    ],
    "openbookqa": [
        {
            "question_stem": "Sharks live",
            "choices": {"text": ["deep", "in trees", "up", "deep sea"], "label": ABCD},
            "answerKey": " A",
        },
        {
            "question_stem": "A dog",
            "choices": {"text": ["barks", "sings", "dog's", "x"], "label": ABCD},
            "answerKey": "B",
        },
    ],
    "piqa": [
        {"goal": "to cut", "sol1": "use a knife's edge", "sol2": 'use "water"', "label": 0},
        {"goal": "How do I sit?", "sol1": "on a chair", "sol2": "on air\n", "label": 1},
    ],
    "winogrande": [
        {"sentence": "Ann met Bea so _ smiled at her.", "option1": "Ann", "option2": "Bea", "answer": "2"},
        {"sentence": "_ won.", "option1": "The cat", "option2": "A dog", "answer": "1"},
    ],
    "social_iqa": [
        {
            "context": "Tom ran.",
            "question": "Why?",
            "answerA": "late",
            "answerB": "bored",
            "answerC": "a b",
            "label": "3",
        }
    ],
    "copa": [
        {"premise": "It rained. ", "choice1": "It got wet.", "choice2": "We left.", "question": "effect", "label": 1},
        {"premise": "He slept.", "choice1": "Tired.", "choice2": "I sang.", "question": "cause", "label": 0},
    ],
    "mmlu": [
        {"question": " 1+1? ", "subject": "abstract_algebra", "choices": ["1", "2", "3", "2 "], "answer": 1},
        {"question": "Who?", "subject": "us_foreign_policy", "choices": ["a", "b's", "c", "d"], "answer": 3},
    ],
}

FILES = {
    "arc_easy": "arc_easy.test.jsonl",
    "arc_challenge": "arc_challenge.test.jsonl.gz",
    "boolq": "boolq.validation.jsonl",
    "hellaswag": "hellaswag.validation.jsonl",
    "openbookqa": "openbookqa.validation.jsonl",
    "piqa": "piqa.validation.jsonl",
    "winogrande": "winogrande_xl.validation.jsonl",
    "social_iqa": "social_i_qa.validation.jsonl",
    "copa": "copa.validation.jsonl",
    "mmlu": "mmlu.test.jsonl",
}

PAGES = [
    ' \n = Ice = \n \n Ice \'s cold ; it @-@ melts . \n = = More = = \n ( a ) N " b " \n',
    " = Tea = \n Hot , good ! \n",
]


def write_sets(folder: Path) -> Path:
    """A folder as ``--data`` takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in DOCUMENTS.items():
        text = "".join(json.dumps(document) + "\n" for document in documents).encode()
        path = folder / FILES[name]
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    (folder / "wikitext-2-raw.test.txt").write_text("".join(PAGES))
    return folder
