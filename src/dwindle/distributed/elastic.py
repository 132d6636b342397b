"""What the restarts of a ``torchrun --max-restarts`` job share: a store, which outlives the processes of an attempt.

torchrun counts restarts for each machine by itself, and its run id may be equal in two jobs (``--rdzv-id``), so neither
``TORCHELASTIC_RESTART_COUNT`` nor ``TORCHELASTIC_RUN_ID`` is used.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from hashlib import sha256
from typing import Any
from uuid import uuid4

from dwindle.core.errors import UserError

_CONNECT = timedelta(seconds=10)


def shares_store() -> bool:
    """Whether the store of this process is torchrun's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def job_id() -> str:
    """A name for the torchrun job of this process, equal in all its attempts and in no other job; empty without one."""
    return _store().compare_set("dwindle/job", "", uuid4().hex).decode() if shares_store() else ""


def said_before(message: str) -> bool:
    """Whether a process of this torchrun job, also in an earlier attempt, has printed this error."""
    if not shares_store():
        return False
    try:
        return int(_store().add(f"dwindle/said/{sha256(message.encode()).hexdigest()}", 1)) > 1
    except RuntimeError:  # on the other side of a broken link
        return False


def attempt_id(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """A name that the processes of one attempt agree on, to separate their keys from those of earlier attempts.

    The main process answers the last question of each other process until it is heard: a question may be that of a dead
    process.
    """
    mine = uuid4().hex
    if rank:
        store.set(f"dwindle/question/{rank}", mine)
        attempt = store.get(f"dwindle/answer/{mine}").decode()
        store.set(f"dwindle/heard/{attempt}/{rank}", "")
        return str(attempt)
    missing, deadline = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"dwindle/question/{other}"]):
                question = store.get(f"dwindle/question/{other}").decode()
                store.set(f"dwindle/answer/{question}", mine)
        missing = {other for other in missing if not store.check([f"dwindle/heard/{mine}/{other}"])}
        if missing and time.monotonic() > deadline:
            raise UserError(
                f"process {min(missing)} did not join within {timeout.total_seconds():g} s: look at its log"
            )
        time.sleep(0.02)
    return mine


def _store() -> Any:
    from torch._C._distributed_c10d import TCPStore  # slow, and needed under torchrun only

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=_CONNECT)
