"""All inputs of ``campaign.py`` in one folder: tokens of the mixture and of held-out texts, tasks, prompts, models.

    python studies/campaign_inputs.py CORPUS --eval SETS --instruct PROMPTS --out inputs
    python studies/campaign_inputs.py CORPUS --eval SETS --instruct PROMPTS --out inputs --second QWEN.gguf

CORPUS is what ``mixture.py`` reads, and ``wikitext-2-raw.test.txt``; SETS and PROMPTS are copied. Tokens are written
once: called again, it adds what is missing. Of the second model's texts a share is tokenized, enough for 9M tokens.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from campaign import TEXTS, Places
from mixture import cut
from transformers import PreTrainedTokenizerBase

from dwindle.commands.main import run_command
from dwindle.data.token_files import open_token_files, write_token_files
from dwindle.sources.loading import load_tokenizer, locate

WIKITEXT = "wikitext2"
PROMPTS = ("ifeval.prompts.jsonl", "vicuna_bench.question.jsonl", "natural_instructions.permissive.jsonl.xz")
HELD_OUT = ("psychology", "marketing", "mixed.test")
SECOND_SHARE = 0.57
"""Of the training texts, for the second model: whole documents from the start."""


def tokenized(text: Path, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write token files of a text unless they are there."""
    files = open_token_files(out) if out.is_dir() else write_token_files([str(text)], tokenizer, out)
    print(f"{out}: {files.num_tokens:,} tokens", flush=True)


def beginning(text: Path, share: float, folder: Path) -> Path:
    """The first documents of a text, one in each line."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    part = folder / text.name
    part.write_text("".join(lines[: round(len(lines) * share)]), encoding="utf-8")
    return part


def copied(file: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        shutil.copyfile(file, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="a file or an alias")
    parser.add_argument("--eval", type=Path, required=True, help="folder with the sets of the tasks")
    parser.add_argument("--instruct", type=Path, required=True, help=f"folder with {', '.join(PROMPTS)}")
    parser.add_argument("--second", type=Path, help="GGUF file of the second model")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    places = Places(args.out, args.out, args.out)
    with tempfile.TemporaryDirectory() as temporary:
        texts = Path(temporary)
        cut(args.corpus, texts)
        files = {path.stem: path for path in texts.glob("*.jsonl")}
        files[WIKITEXT] = args.corpus / "wikitext-2-raw.test.txt"
        tokenizer = load_tokenizer(args.model)
        for name, file in files.items():
            tokenized(file, tokenizer, places.tokens / name)
        if args.second:
            tokenizer = load_tokenizer(str(args.second))
            for name in (*TEXTS, *HELD_OUT, WIKITEXT):
                text = beginning(files[name], SECOND_SHARE, texts) if name in TEXTS else files[name]
                tokenized(text, tokenizer, places.second_tokens / name)
            copied(args.second, places.second)
    copied(locate(args.model, weights=True)[1], places.source)
    for file in args.eval.glob("*.jsonl.gz"):
        copied(file, args.out / "eval" / file.name)
    for name in PROMPTS:
        copied(args.instruct / name, args.out / "prompts" / name)


if __name__ == "__main__":
    run_command(main)
