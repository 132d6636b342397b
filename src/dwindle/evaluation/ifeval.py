"""IFEval: instructions that a program can check, with the checkers of lm-evaluation-harness.

Strict: the answer as it is. Loose: also without its first line, its last line, both, and without asterisks. Some
checkers need langdetect or NLTK's punkt_tab data; where these are missing, their instructions are skipped and counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from dwindle.core.errors import UserError, first_line, install_hint

_LANGUAGE = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
_SENTENCES = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
LEVELS = ("prompt_strict", "inst_strict", "prompt_loose", "inst_loose")


class Checkers:
    """The harness's checkers, and the instructions that cannot be checked here."""

    def __init__(self) -> None:
        has_langdetect = importlib.util.find_spec("langdetect") is not None
        try:
            # the module downloads NLTK's data on import, unless it believes to run on another rank than the first
            with patch.dict(os.environ, {"LOCAL_RANK": "1"}), _stand_in(has_langdetect):
                self._utils = importlib.import_module("lm_eval.tasks.ifeval.utils")
                nltk = importlib.import_module("nltk")
        except ImportError as error:
            raise UserError(f"ifeval: its checkers need {error.name or 'lm_eval'}: {install_hint('eval')}") from error
        self.missing: dict[str, str] = {}
        """Instruction and what it needs."""
        if has_langdetect:
            importlib.import_module("langdetect").DetectorFactory.seed = 0  # it guesses at random otherwise
        else:
            self.missing |= dict.fromkeys(_LANGUAGE, "langdetect (pip install langdetect)")
        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError:
            self.missing |= dict.fromkeys(_SENTENCES, "NLTK's punkt_tab (python -m nltk.downloader punkt_tab)")
        self._known = set(self._utils.instructions_registry.INSTRUCTION_DICT)

    def check(self, document: Mapping[str, Any], answer: str) -> dict[str, list[bool]]:
        """Which of the instructions that can be checked are followed, strictly and loosely."""
        kept = [
            (name, arguments)
            for name, arguments in zip(document["instruction_id_list"], document["kwargs"], strict=True)
            if name not in self.missing
        ]
        given = self._utils.InputExample(
            key=document["key"],
            instruction_id_list=[name for name, _ in kept],
            prompt=document["prompt"],
            kwargs=[dict(arguments) for _, arguments in kept],
        )
        with _random_numbers(f"ifeval {document['key']}"):
            strict = self._utils.test_instruction_following_strict(given, answer)
            loose = self._utils.test_instruction_following_loose(given, answer)
        return {"strict": strict.follow_instruction_list, "loose": loose.follow_instruction_list}

    def left_out(self, document: Mapping[str, Any]) -> list[str]:
        return [name for name in document["instruction_id_list"] if name in self.missing]

    def check_document(self, document: Any) -> None:
        """Raise ValueError for a document that is not IFEval's."""
        names, arguments = document["instruction_id_list"], document["kwargs"]
        if not isinstance(document["prompt"], str) or not document["prompt"].strip() or not names:
            raise ValueError("no prompt or no instruction")
        if len(names) != len(arguments) or not all(isinstance(one, Mapping) for one in arguments):
            raise ValueError("instructions and their arguments do not match")
        if unknown := [name for name in names if name not in self._known]:
            raise ValueError(f"unknown instruction {unknown[0]!r}")
        try:
            self.check(document, "a")
        except Exception as error:  # whatever a checker raises for arguments that it does not have
            raise ValueError(f"arguments that its instructions do not have: {first_line(error)}") from error


def levels(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Values to average for each of ``LEVELS``; ``results`` are those of ``check``, with ``whole`` if nothing was left
    out. A prompt that lost an instruction has no prompt-level result; one that lost all has none."""
    found: dict[str, list[float]] = {level: [] for level in LEVELS}
    for result in results:
        for kind in ("strict", "loose"):
            found[f"inst_{kind}"] += map(float, result[kind])
            if result["whole"]:
                found[f"prompt_{kind}"].append(float(all(result[kind])))
    return found


@contextmanager
def _random_numbers(seed: str) -> Iterator[None]:
    """Fix the seed: where an instruction has no argument, its checker draws one."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _stand_in(is_installed: bool) -> Iterator[None]:
    """An empty ``langdetect``, so that the module of all checkers can be imported without it."""
    if is_installed:
        yield
        return
    sys.modules["langdetect"] = ModuleType("langdetect")
    try:
        yield
    finally:
        del sys.modules["langdetect"]
