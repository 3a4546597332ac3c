"""Every bench of this folder, one after the other: ``python -m tests.bench [NAME...]``.

Each prints its table; the last table holds the figures that have a goal. Benches of one core run
on one (see harness.py), the one of the bus on all, as its server runs beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from harness import JSON_ENV, Goal, summary  # noqa: E402 - a bench finds it beside itself, so do we


def machine() -> dict[str, object]:
    """Return what the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def environ(wrote: Path) -> dict[str, str]:
    """Return the environment of a bench, which writes its figures into ``wrote``.

    A bench is a script, so that only its own folder is on its path; it imports ``tests.support``.
    """
    places = [str(FOLDER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {JSON_ENV: str(wrote), "PYTHONPATH": os.pathsep.join(places)}


def run(path: Path, wrote: Path) -> dict[str, Any] | None:
    """Run one bench in a process of its own; returns its figures, or None if it failed.

    One that writes none is in no table but its own.
    """
    if subprocess.run([sys.executable, str(path)], env=environ(wrote), check=False).returncode:
        return None
    if not wrote.exists():
        return {"bench": path.stem.removeprefix("bench_"), "results": [], "goals": []}
    found: dict[str, Any] = json.loads(wrote.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Run the named benches (default: all); 1 if one failed, 2 if there is none of that name."""
    found = {path.stem.removeprefix("bench_"): path for path in sorted(FOLDER.glob("bench_*.py"))}
    parser = argparse.ArgumentParser(description="Run benches and compare them with their goals.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(found)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    wanted = parser.parse_args()
    unknown = [name for name in wanted.names if name not in found]
    if unknown:
        print(f"There is no bench {', '.join(unknown)}; there are {', '.join(found)}.")
        return 2
    before, start = machine(), time.monotonic()
    figures: dict[str, dict[str, Any] | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted.names or found:
            print(f"== {name}", flush=True)
            figures[name] = run(found[name], Path(folder) / f"{name}.json")
    goals = [Goal(**goal) for bench in figures.values() if bench for goal in bench["goals"]]
    print(f"== goals ({time.monotonic() - start:.0f} s, load {before['load']} at the start)")
    print(summary(goals))
    if wanted.json:
        text = json.dumps({"machine": before, "benches": figures}, indent=1)
        wanted.json.write_text(text + "\n", encoding="utf-8")
    failed = [name for name, bench in figures.items() if bench is None]
    if failed:
        print(f"Failed: {', '.join(failed)}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
