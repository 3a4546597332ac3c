"""Which accelerators each learner of a local cluster sees: its own, and no other's."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
PLATFORMS = "JAX_PLATFORMS"
LIST = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
LIST_S = 10.0


def shares(learners: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
    """Return what each learner's ``CUDA_VISIBLE_DEVICES`` is; empty where there are no devices.

    Neighbours stay together, and the first learners get one more where they do not go up evenly.
    Raises ConfigError if a learner would have none: two on one device run out of its memory.
    """
    if not devices:
        return {}
    if len(devices) < len(learners):
        msg = (
            f"This machine shows {len(devices)} accelerators ({VISIBLE}) to {len(learners)}"
            f" learners, and each needs one of its own: start fewer (--learners {len(devices)}),"
            f" or train on the CPU ({PLATFORMS}=cpu)."
        )
        raise ConfigError(msg, path="learners")
    each, more = divmod(len(devices), len(learners))
    found: dict[str, str] = {}
    left = list(devices)
    for number, name in enumerate(learners):
        count = each + (number < more)
        found[name], left = ",".join(left[:count]), left[count:]
    return found


def visible(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the accelerators that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    What is set counts: nothing is looked for where it is, or where JAX is kept on other platforms.
    """
    source = os.environ if environ is None else environ
    platforms = source.get(PLATFORMS, "").lower()
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if VISIBLE in source:
        names = [name.strip() for name in source[VISIBLE].split(",")]
        return [name for name in names if name and name != "-1"]
    if shutil.which(LIST[0]) is None:
        return []
    try:
        listed = subprocess.run(LIST, capture_output=True, text=True, check=True, timeout=LIST_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()
