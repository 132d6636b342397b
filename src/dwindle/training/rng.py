"""All random generators: seeded together, saved in checkpoints, restored exactly."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and every CUDA device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The JSON part of all generators' states; ``rng_tensors`` has the rest."""
    version, _, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict) and legacy["bit_generator"] == "MT19937"
    return {
        "python": {"version": version, "gauss": gauss},
        "numpy": {
            "position": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
    }


def rng_tensors() -> dict[str, Tensor]:
    """The tensor part of all generators' states."""
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    tensors = {
        "python": torch.tensor(random.getstate()[1], dtype=torch.int64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def load_rng(state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Inverse of ``rng_state`` and ``rng_tensors``; states of CUDA devices that do not exist here are ignored."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    key = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(tensors["torch"].cpu())
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda:{index}"].cpu(), index)
