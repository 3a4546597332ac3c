"""Processes that are one learner together, started by a test from a script of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self


class Several:
    """Two processes of a script; each gets its number as the last argument."""

    def __init__(
        self,
        folder: Path,
        script: Path,
        *arguments: str,
        environment: Mapping[str, str],
        of: int = 2,
    ) -> None:
        folder.mkdir()
        self.logs = [folder / f"{number}.log" for number in range(2)]
        self.processes = list[subprocess.Popen[bytes]]()
        for number, log in enumerate(self.logs):
            command = [sys.executable, str(script), *arguments, str(number)]
            with log.open("w") as said:
                process = subprocess.Popen(
                    command, env=os.environ | environment, stdout=said, stderr=subprocess.STDOUT
                )
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def ended(self, within_s: float = 100) -> list[int]:
        """Wait until all have ended; returns their exit codes."""
        return [process.wait(within_s) for process in self.processes]

    def said(self, word: str = "") -> list[list[str]]:
        """Return the lines of each that have a word."""
        texts = [log.read_text() for log in self.logs]
        return [[line for line in text.splitlines() if word in line] for text in texts]
