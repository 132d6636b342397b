"""One grammar of numbers and sizes, for recipes, options and reports."""

from __future__ import annotations

import pytest

from dwindle.core.errors import UserError
from dwindle.core.sizes import Size, format_bytes, format_count, parse_count, parse_size


@pytest.mark.parametrize("text", ["1,5M", "1,50", "12,3456", ",5", "1,,000"])
def test_a_comma_is_not_a_decimal_point(text: str) -> None:
    with pytest.raises(UserError, match="is not a number"):
        parse_count(text)


def test_commas_separate_thousands() -> None:
    assert parse_count("1,500,000") == 1_500_000 and parse_count("1,500.5k") == 1_500_500


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100M", Size("count", 100_000_000)),
        (" 1_000 ", Size("count", 1000)),
        ("1.5k", Size("count", 1500)),
        ("0.6", Size("share", 0.6)),
        (".6", Size("share", 0.6)),
        ("60%", Size("share", 0.6)),
        ("60.%", Size("share", 0.6)),
        (".5%", Size("share", 0.005)),
        ("62.5 %", Size("share", 0.625)),
        ("50%nonemb", Size("nonemb share", 0.5)),
        ("50. % nonemb", Size("nonemb share", 0.5)),
        ("hidden=512,heads=8,ffn=1280", Size("shape", shape={"hidden": 512, "heads": 8, "ffn": 1280})),
        ("heads = 8", Size("shape", shape={"heads": 8})),
        ("90MB@q8_0", Size("file", 90_000_000, file_type="q8_0")),
        (" 1.5 GB @ BF16", Size("file", 1_500_000_000, file_type="bf16")),
        ("900B@q4_k_m", Size("file", 900, file_type="q4_k_m")),
    ],
)
def test_sizes(text: str, size: Size) -> None:
    assert parse_size(text, "prune.target") == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a size such as 100M, 0.6, 60%, 50%nonemb, hidden=512"),
        ("50%emb", "'50%emb' is not a size"),
        ("0", "'0' must be above 0"),
        ("0%", "'0%' must be above 0 and below 100%"),
        ("100%", "'100%' must be above 0 and below 100%"),
        ("1.", "'1.' must be above 0 and below 100%"),
        ("1.5", "'1.5' must be above 0 and below 100%"),
        ("120%nonemb", "'120%nonemb' must be above 0 and below 100%"),
        ("heads=8,heads=9", "'heads=8,heads=9' gives heads twice"),
        ("heads=0", "'heads=0' is not part of a shape such as hidden=512"),
        ("x=1", "'x=1' is not part of a shape"),
        ("a=", "'a=' is not part of a shape"),
        ("90MB@", "'90MB@' is not a file's size and type such as 90MB@q8_0"),
        ("0MB@q8_0", "'0MB@q8_0' must be above 0"),
    ],
)
def test_sizes_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_size(text, "prune.target")
    assert str(refused.value).startswith(f"prune.target: {message}")


def test_three_digits_without_an_exponent() -> None:
    """Also just below the next unit, and above the last one."""
    assert [format_bytes(n) for n in (999, 12_345, 999_600_000, 1_500_000_000_000)] == [
        "999 B",
        "12.3 kB",
        "1000 MB",
        "1500 GB",
    ]
    assert [format_count(n) for n in (999, 134_515_008, 999_600, 2 * 10**15)] == ["999", "135M", "1000k", "2000T"]
