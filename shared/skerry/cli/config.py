"""``skerry init`` writes a config for this machine; ``skerry config show`` prints all settings."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

import psutil

from skerry.cli.cluster import devices
from skerry.data.files import files_below
from skerry.errors import ConfigError
from skerry.models.axes import MeshSizes
from skerry.models.memory import activation_bytes, learner_memory
from skerry.models.presets import arch_of
from skerry.models.tensors import leaf_specs_of
from skerry.settings import loading
from skerry.settings.models import DataConfig, ModelConfig, SyncConfig, TrainConfig
from skerry.settings.tree import toml_value

MEMORY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
SIZES: tuple[Literal["base", "small", "micro", "nano"], ...] = ("base", "small", "micro", "nano")
"""Presets for text that is read as bytes, the largest first."""
CORE_FLOPS = 2e10
"""FLOP that a CPU core computes a second; a step on a CPU should take no longer than a second."""
MOST_MEMORY = 0.6
PASSES = 4
"""Times that a run reads the text, at most."""
STEPS = 100, 1000
COMMENTS = 44
"""Column in which comments stand."""

FILE = Template("""\
# A run for this machine: $machine.
# Start it:   skerry up $name
# See what counts, and from where:   skerry config show $name

[model]
preset = "$preset"  # $why

[data]
$data
batch = $batch  # sequences per step of each learner
seq_len = $seq_len  # bytes per sequence

[train]
steps = $steps  # on the global clock; the run ends there

[sync]
learners = $learners  # processes that train, each at its own speed
# quorum = 1  # K: a round may close once this many have answered
# h_steps = 24  # H: each fragment is synchronised once per this many steps

[checkpoint]
every_s = 30  # seconds; below .skerry/checkpoints, and one at the end
""")


@dataclass(frozen=True, slots=True)
class Machine:
    """What trains here: cores, and the memory of all learners' devices together."""

    cores: int
    memory_bytes: float
    accelerators: int

    @classmethod
    def this(cls) -> Machine:
        seen = len(devices.visible())
        memory: float = psutil.virtual_memory().total
        if seen:
            try:
                listed = subprocess.run(
                    MEMORY, capture_output=True, text=True, check=True, timeout=devices.LIST_S
                )
                memory = seen * min(map(float, listed.stdout.split())) * 2**20
            except (OSError, ValueError, subprocess.SubprocessError):
                seen = 0
        return cls(devices.usable_cores(), memory, seen)

    def __str__(self) -> str:
        what = f"{self.accelerators} NVIDIA GPUs" if self.accelerators else f"{self.cores} cores"
        return f"{what}, {self.memory_bytes / 2**30:.0f} GiB"


def fitting(machine: Machine, learners: int) -> tuple[str, str]:
    """Return the largest preset that trains here, and why it is that one."""
    data, sync, train = DataConfig(), SyncConfig(), TrainConfig()
    for preset in SIZES:
        arch = arch_of(ModelConfig(preset=preset))
        parameters = sum(leaf.size for leaf in leaf_specs_of(arch))
        sizes = MeshSizes()
        passing = activation_bytes(arch, sizes, train, data.batch, data.seq_len)
        need = learner_memory(parameters, sizes, train, sync, activations=passing).total * learners
        flops = 6 * parameters * data.batch * data.seq_len * learners
        step_s = flops / (CORE_FLOPS * machine.cores)
        slow = not machine.accelerators and step_s > 1
        if preset == SIZES[-1] or not (slow or need > MOST_MEMORY * machine.memory_bytes):
            why = f"{parameters / 1e6:.1f} million parameters; {need / 2**30:.1f} GiB in all"
            return preset, why
    raise AssertionError


def text_in(folder: Path) -> tuple[tuple[str, ...], int]:
    """Return the name endings of a folder's text, and its bytes.

    Raises ConfigError for a folder without any, CorpusError for one that cannot be read.
    """
    if not folder.exists():
        msg = f"There is no {folder}: name a file or folder with the text to train on."
        raise ConfigError(msg, path="data.paths")
    if folder.is_file() and (size := folder.stat().st_size):
        return (), size
    sizes = Counter[str]()
    for path in files_below(folder) if folder.is_dir() else ():
        if path.is_file() and not path.name.startswith("."):
            sizes[path.suffix] += path.stat().st_size
    usual = [suffix for suffix in DataConfig().suffixes if sizes[suffix]]
    found = usual or [suffix for suffix, size in sizes.most_common(1) if size]
    if not found:
        msg = f"{folder} holds no text: name a file or folder with the text to train on."
        raise ConfigError(msg, path="data.paths")
    return tuple(found), sum(sizes[suffix] for suffix in found)


def run_init(text: Path | None, *, out: Path, learners: int | None, force: bool) -> None:
    """Write a commented config for this machine, and say what to do with it."""
    if out.exists() and not force:
        msg = f"{out} is there already: add --force to write it again, or --out another.toml."
        raise ConfigError(msg, path="out")
    machine = Machine.this()
    count = learners or max(2, machine.accelerators)
    preset, why = fitting(machine, count)
    data, steps = DataConfig(), STEPS[-1]
    lines = ['source = "stdlib"  # Python\'s own sources; text of yours: skerry init FOLDER']
    if text is not None:
        suffixes, size = text_in(text.expanduser())
        reads = data.batch * data.seq_len * count
        steps = max(STEPS[0], min(steps, PASSES * size // reads))
        lines = [
            f'source = "text"  # {size / 1e6:,.1f} MB, read as bytes',
            f"paths = [{toml_value(str(text.expanduser().absolute()))}]",
        ]
        if not {*suffixes} <= {*data.suffixes}:
            lines.append(f"suffixes = {toml_value(suffixes)}")
    filled = FILE.substitute(
        machine=machine,
        name=shlex.quote(str(out)),
        preset=preset,
        why=why,
        data="\n".join(lines),
        batch=data.batch,
        seq_len=data.seq_len,
        steps=steps,
        learners=count,
    )
    try:
        out.write_text("".join(map(_aligned, filled.splitlines())), encoding="utf-8")
    except OSError as error:
        msg = f"{out} cannot be written: {error.strerror}. Name another file with --out."
        raise ConfigError(msg, path="out") from error
    print(f"Wrote {out}: {preset}, {why}, {count} learners, {steps} steps, for {machine}.")
    if not machine.accelerators and count > machine.cores:
        few = f"{count} learners share {machine.cores} cores, and a step takes that much longer"
        print(f"{few}: --learners {machine.cores} gives each a core of its own.")
    print(f"Start it: skerry up {shlex.quote(str(out))}")


def _aligned(line: str) -> str:
    code, mark, comment = line.rpartition("  # ")
    return f"{code:<{COMMENTS - 4}}{mark}{comment}\n" if mark else f"{line}\n"


def run_config_show(
    config: Path | None, sets: Sequence[str], *, given: bool, as_json: bool
) -> None:
    """Print every setting as TOML, or JSON, with what set it."""
    rows = loading.origins(*loading.loaded(config, sets))
    rows = [row for row in rows if not (given and row.origin == "default")]
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return
    table = ""
    for row in sorted(rows, key=lambda row: "." in row.setting):
        name, dot, key = row.setting.partition(".")
        if dot and name != table:
            table = name
            print(f"\n[{name}]")
        unset = row.value is None
        line = (
            f"{'# ' if unset else ''}{key or name} = {'unset' if unset else toml_value(row.value)}"
        )
        print(_aligned(f"{line}  # {row.origin}"), end="")
