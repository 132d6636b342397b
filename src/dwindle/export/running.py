"""How an export is run: the commands that are printed after it, each for one runtime."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shlex import quote

PROMPT = "Once upon a time"


def ways_to_run(out: str | Path, to: str, *, custom_code: bool = False, layout: str | None = None) -> dict[str, str]:
    """Runtime and command line for an export; the first one needs nothing more."""
    place, prompt = quote(str(out)), quote(PROMPT)
    ours = f"dwindle generate {place} {prompt}"
    if to == "gguf":
        from dwindle.export.ollama import place_of  # which imports torch

        modelfile, name = (
            quote(str(place_of(Path(out)))),
            re.sub(r"[^a-z0-9._-]+", "-", Path(out).stem.lower()).strip("-") or "small",
        )
        create = f"ollama create {name} -f {modelfile}"
        return {
            "llama.cpp through xllamacpp": ours,
            "llama.cpp": f"llama-cli -m {place} -p {prompt} -n 48",
            "Ollama": f"{create} && ollama run {name} {prompt}",
        }
    if to == "transformers.js":
        folder = Path(out).resolve()
        code = (
            'import { env, pipeline } from "@huggingface/transformers"; '
            f'env.localModelPath = "{folder.parent}/"; env.allowRemoteModels = false; '
            f'const run = await pipeline("text-generation", "{folder.name}", {{ dtype: "q4" }}); '
            f'console.log((await run("{PROMPT}", {{ max_new_tokens: 48 }}))[0].generated_text)'
        )
        return {"Node, where @huggingface/transformers is installed": f"node --input-type=module -e {quote(code)}"}
    if to == "executorch":
        return {}  # an app loads it; there is no command
    if to == "onnx":
        return {"onnxruntime": ours}
    if layout == "deci":
        return {"vLLM": f"vllm serve {place} --trust-remote-code"}
    remote = ", trust_remote_code=True" if custom_code else ""
    call = f'pipeline("text-generation", {json.dumps(str(out))}{remote})("{PROMPT}", max_new_tokens=48)'
    code = f'from transformers import pipeline; print({call}[0]["generated_text"])'
    return {"transformers": ours, "Python": f"python -c {quote(code)}"}
