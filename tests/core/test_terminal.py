"""What a terminal shows: titles of tables, samples."""

from __future__ import annotations

import io

from rich.table import Table

from dwindle.core.quality import Quality, Sample
from dwindle.core.terminal import PlainConsole, titled


def test_a_long_title_is_not_broken_at_the_width_of_its_table() -> None:
    console = PlainConsole(width=100, file=io.StringIO())
    console.print(titled("/some/long/path/to/a/model.gguf → /another\x1b[1m/path", Table("a", "b")))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("/some/long/path/to/a/model.gguf → /another\\x1b[1m/path\n")


def test_samples_keep_their_colour() -> None:
    console = PlainConsole(record=True, file=io.StringIO())
    console.print("source: `f(1)` is 'None' or 2.5")
    assert "color" not in console.export_html(code_format="{code}", inline_styles=True)


def test_of_a_long_prompt_its_end_is_shown() -> None:
    found = Quality(samples=[Sample("instruction " * 100 + "Response:", "yes", "no"), Sample("Once", "a", "b")])
    first, *_, last = (line for line in found.sample_lines() if line.startswith("greedy"))
    assert len(first) < 220 and first.startswith("greedy: … ") and first.endswith("Response: …")
    assert last == "greedy: Once …"
