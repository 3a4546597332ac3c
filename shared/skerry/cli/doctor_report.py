"""Print what ``skerry doctor`` found."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from skerry.cli.doctor import Finding, Verdict, as_json, examine
from skerry.settings import loading
from skerry.settings.models import NatsSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

MARKS = {
    Verdict.OK: "[green]ok  [/]",
    Verdict.WARN: "[yellow]warn[/]",
    Verdict.FAIL: "[red]FAIL[/]",
}


def run_doctor(
    *, config: Path | None, sets: Sequence[str], nats: str | None, as_json: bool
) -> None:
    """Examine this machine, print the findings and exit with 1 if a required one failed."""
    overrides = [*sets, *([f"nats.url={nats}"] if nats else [])]
    found = loading.load(config, overrides)
    named = found.local.nats.url != NatsSettings().url
    findings = examine(found, reach_broker=named or nats is not None)
    told = _print_json(findings) if as_json else _print_lines(findings)
    sys.exit(1 if any(f.verdict is Verdict.FAIL for f in told) else 0)


def _print_json(findings: Iterable[Finding]) -> list[Finding]:
    told = list(findings)
    print(json.dumps(as_json(told), indent=2))
    return told


def _print_lines(findings: Iterable[Finding]) -> list[Finding]:
    console, told = Console(highlight=False), list[Finding]()
    for finding in findings:
        told.append(finding)
        console.print(
            f"{MARKS[finding.verdict]} {finding.check:<18} {escape(finding.found)}", soft_wrap=True
        )
        if finding.fix:
            console.print(f"     {'':<18} [dim]{escape(finding.fix)}[/]", soft_wrap=True)
    return told
