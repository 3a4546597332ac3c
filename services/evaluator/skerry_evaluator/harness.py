"""Handing a checkpoint to lm-evaluation-harness, where it is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from skerry import installing
from skerry.errors import ConfigError
from skerry.models.export import export_hf
from skerry.settings.local import StoreSettings


def judge(where: str, tasks: str, tokenizer: Path | None, access: StoreSettings) -> None:
    """Export a checkpoint to a temporary folder, and have the harness run tasks on it.

    The harness prints its own output. Raises ConfigError where it is not installed or fails, and as
    ``export_hf`` does.
    """
    if importlib.util.find_spec("lm_eval") is None:
        msg = f"--tasks needs lm-evaluation-harness: run `{installing.command('lm-eval[hf]')}`."
        raise ConfigError(msg, path="tasks")
    if tokenizer is None:
        msg = "--tasks needs the model's tokenizer: name its folder with --tokenizer."
        raise ConfigError(msg, path="tokenizer")
    with tempfile.TemporaryDirectory(prefix="skerry-eval-") as scratch:
        folder = export_hf(where, Path(scratch) / "model", access, source=tokenizer)
        command = [
            *(sys.executable, "-m", "lm_eval", "--model", "hf"),
            *("--model_args", f"pretrained={folder}", "--tasks", tasks),
        ]
        done = subprocess.run(command, check=False)
    if done.returncode:
        msg = f"lm_eval ended with {done.returncode}: its last lines say why."
        raise ConfigError(msg, path="tasks")
