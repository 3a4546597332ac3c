"""Which accelerators each learner of a local cluster sees: its own, or its share of one."""

from __future__ import annotations

import os
import shutil
import subprocess
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from skerry import installing
from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
PLATFORMS = "JAX_PLATFORMS"
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MOST_MEMORY = 0.9
"""Share of an accelerator's memory for all learners that share it."""
LIST = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
LIST_S = 10.0
GPU = frozenset({"cuda", "gpu"})
KNOWN = ("cpu", "cuda", "gpu", "tpu", "rocm")
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def usable_cores() -> int:
    """Return the CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shares(learners: Sequence[str], devices: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return each learner's environment variables for accelerators; empty if there are none.

    Neighbouring accelerators stay together; the first learners get one more if the division is not
    even. If there are fewer, each learner shares one, with an even part of its memory.
    """
    if not devices:
        return {}
    found: dict[str, dict[str, str]] = {}
    if len(devices) < len(learners):
        for number, name in enumerate(learners):
            at = number % len(devices)
            together = len(range(at, len(learners), len(devices)))
            found[name] = {VISIBLE: devices[at], MEMORY: f"{MOST_MEMORY / together:.2g}"}
        return found
    each, more = divmod(len(devices), len(learners))
    left = list(devices)
    for number, name in enumerate(learners):
        count = each + (number < more)
        found[name], left = {VISIBLE: ",".join(left[:count])}, left[count:]
    return found


def shared(learners: int, devices: int) -> str:
    """Return a sentence about learners that share accelerators; empty where none does."""
    if not devices or learners <= devices:
        return ""
    which = "the accelerator" if devices == 1 else f"{devices} accelerators"
    return (
        f"{learners} learners share {which} of this machine, each with a part of its memory: start"
        f" fewer (--learners {devices}) for a model that does not fit, or train on the CPU"
        f" ({PLATFORMS}=cpu)."
    )


def _platforms() -> list[str]:
    """Return the platforms that JAX is to try, in lower case; empty if it takes what there is."""
    return [name for name in os.environ.get(PLATFORMS, "").lower().split(",") if name]


def refuse_missing() -> None:
    """Raise ConfigError where ``JAX_PLATFORMS`` is mistyped, or wants a GPU that is not here."""
    platforms = _platforms()
    said = f"{PLATFORMS} is {os.environ.get(PLATFORMS)}, which"
    for name in platforms:
        near = get_close_matches(name, KNOWN, 1)
        if near and name not in KNOWN:
            msg = f"{said} JAX does not know: did you mean {near[0]}?"
            raise ConfigError(msg, path=PLATFORMS)
    if not GPU & set(platforms):
        return
    why = ""
    if not any(map(find_spec, PLUGINS)):
        why = f"JAX has no plugin for it: run `{installing.command(extra='cuda')}`, or"
    elif not (visible() or any(map(Path.exists, DRIVERS))):
        why = "this machine shows none (`nvidia-smi` lists them): see to its driver, or"
    if why:
        msg = f"{said} asks for a GPU, but {why} unset {PLATFORMS}."
        raise ConfigError(msg, path=PLATFORMS)


def visible() -> list[str]:
    """Return the accelerators that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    If that is set, or JAX is kept to other platforms, nothing else is looked for.
    """
    platforms = _platforms()
    if platforms and not GPU & set(platforms):
        return []
    if VISIBLE in os.environ:
        names = [name.strip() for name in os.environ[VISIBLE].split(",")]
        return [name for name in names if name and name != "-1"]
    if shutil.which(LIST[0]) is None:
        return []
    try:
        listed = subprocess.run(LIST, capture_output=True, text=True, check=True, timeout=LIST_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()
