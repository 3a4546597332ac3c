"""Print what ``skerry doctor`` found."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from skerry.cli.doctor import Finding, Severity, as_json, examine
from skerry.settings import loading
from skerry.settings.models import NatsSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

MARKS = {
    Severity.OK: "[green]ok  [/]",
    Severity.WARN: "[yellow]warn[/]",
    Severity.FAIL: "[red]FAIL[/]",
}


def run_doctor(
    *, config: Path | None, sets: Sequence[str], nats: str | None, as_json: bool
) -> None:
    """Examine this machine, print the findings and exit with 1 if a required one failed."""
    overrides = [*sets, *([f"nats.url={nats}"] if nats else [])]
    found = loading.load(config, overrides)
    named = found.local.nats.url != NatsSettings().url
    findings = examine(found, reach_broker=named or nats is not None)
    failed = _print_json(findings) if as_json else _print_lines(findings)
    sys.exit(1 if failed else 0)


def _print_json(findings: Iterable[Finding]) -> bool:
    report = as_json(list(findings))
    print(json.dumps(report, indent=2))
    return not report["ok"]


def _print_lines(findings: Iterable[Finding]) -> bool:
    """Print each finding as soon as it is known, and return True if one failed."""
    console, failed = Console(highlight=False), False
    for finding in findings:
        failed |= finding.verdict is Severity.FAIL
        console.print(
            f"{MARKS[finding.verdict]} {finding.check:<18} {escape(finding.found)}", soft_wrap=True
        )
        if finding.fix:
            console.print(f"     {'':<18} [dim]{escape(finding.fix)}[/]", soft_wrap=True)
    return failed
