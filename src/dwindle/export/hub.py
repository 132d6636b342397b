"""A repository on the Hugging Face Hub: what is there, and one commit that changes it.

Only huggingface_hub reads the token; it is never written or printed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dwindle.core.errors import UserError, first_line
from dwindle.core.reading import read_json

MANIFEST = "dwindle-files.json"
"""Lists the files of the last push, so that the next one deletes only files of ours."""
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Repository:
    """What a repository holds at a commit; ``ours`` are the files that the last push sent."""

    repo: str
    private: bool
    commit: str | None
    names: frozenset[str]
    ours: frozenset[str]


def check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    with suppress(HFValidationError):
        validate_repo_id(repo)
        if repo.count("/") == 1:
            return
    raise UserError(f"{repo!r}: is not the name of a repository: give user/name, such as me/smollm2-80m")


def look(repo: str, private: bool, endpoint: str | None) -> Repository | None:
    """The content of the repository, for a dry run; None if it does not exist or cannot be read."""
    from huggingface_hub import HfApi

    try:
        there = _read(HfApi(endpoint=endpoint), repo)
    except Exception:
        return None
    _refuse_public(there, private)
    return there


def open_repository(repo: str, private: bool, endpoint: str | None) -> Repository:
    """Create the repository unless it exists, and return its content."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise UserError("push: huggingface_hub knows no access token: log in with `hf auth login`, or set HF_TOKEN")
    api = HfApi(endpoint=endpoint)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        there = _read(api, repo)
    except Exception as error:
        raise UserError(_explained(error, repo)) from None  # the chain may hold signed addresses
    _refuse_public(there, private)
    return there


def send(there: Repository, files: Mapping[str, Path | bytes], deleted: Iterable[str], endpoint: str | None) -> str:
    """One commit on top of what was read; the address of the repository."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(endpoint=endpoint)
    operations = [
        *(CommitOperationAdd(name, content) for name, content in files.items()),
        *(CommitOperationDelete(name) for name in deleted),
    ]
    try:
        api.create_commit(
            there.repo, operations, commit_message="Upload model made with dwindle", parent_commit=there.commit
        )
    except Exception as error:
        raise UserError(_explained(error, there.repo)) from None
    return f"{api.endpoint}/{there.repo}"


def _read(api: Any, repo: str) -> Repository:
    info = api.model_info(repo, timeout=_TIMEOUT_S)
    names = frozenset(sibling.rfilename for sibling in info.siblings or ())
    ours = _listed(api, repo, info.sha) & names if MANIFEST in names else frozenset()
    return Repository(repo, bool(info.private), info.sha, names, ours)


def _listed(api: Any, repo: str, commit: str | None) -> frozenset[str]:
    with TemporaryDirectory() as place:
        found = read_json(Path(api.hf_hub_download(repo, MANIFEST, revision=commit, local_dir=place)))
    files = found.get("files") if isinstance(found, dict) else None
    return frozenset(name for name in files if isinstance(name, str)) if isinstance(files, list) else frozenset()


def _refuse_public(there: Repository, private: bool) -> None:
    if private and not there.private:
        raise UserError(
            f"--private: {there.repo} exists and everyone can read it: make it private on the Hub, give another name, "
            "or omit the option; nothing was sent"
        )


_REFUSALS = {
    401: "the Hub refused the access token (401): run `hf auth login` with a token that may write",
    403: "the Hub refused the access token (403): run `hf auth login` with a token that may write",
    404: "the Hub has no such repository, or does not show it to this token (404): check the name and the token",
    409: "the repository was changed or is being changed by someone else (409): run the same command again",
    412: "the repository was changed meanwhile (412): run the same command again",
}


def _explained(error: Exception, repo: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _REFUSALS:
        return f"push {repo}: {_REFUSALS[status]}"
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
    reason = re.sub(r"\s*\(?(for url|https?:).*", "", first_line(cause), flags=re.IGNORECASE) or type(cause).__name__
    return (
        f"push {repo}: the upload failed ({reason}): the commit was not confirmed; run the same command again, what "
        "has arrived is not sent twice"
    )
