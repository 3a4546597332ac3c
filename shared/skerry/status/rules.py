"""The Prometheus rules of the alerts' table: ``python -m skerry.status.rules [--check] FILE``.

In an expression a metric stands for this monitor's, and ``RUN`` for the labels of one run.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from textwrap import indent

from skerry.status.alert_table import ALERTS, RECORDS, Rule

HEAD = """\
# What an operator wants to be woken for, or to find in the morning. The health monitor's page shows
# the same conditions, but for what docs/observability.md names. Generated from the table in
# skerry/status/alert_table.py: `python -m skerry.status.rules infra/prometheus/rules.yml`.
# Check and test: promtool test rules infra/prometheus/rules_test.yml
#
# severity: critical stops training or loses work, warning costs goodput.
groups:
  - name: skerry
    rules:
"""
METRIC = re.compile(r"(?<![:\w])(skerry_\w+)(?!\w*:)(\{?)")


def rendered() -> str:
    """Return the file of rules."""
    made = [_rule("record", rule) for rule in RECORDS]
    made += [
        _rule("alert", rule, kind.severity.value, kind.fix)
        for kind in ALERTS
        for rule in kind.rules
    ]
    return HEAD + "\n".join(made)


def _rule(kind: str, rule: Rule, severity: str = "", fix: str = "") -> str:
    lines = [f"- {kind}: {rule.name}", "  expr: |", indent(_expression(rule.expr), "    ")]
    if rule.for_:
        lines.append(f"  for: {rule.for_}")
    if rule.summary:
        lines += [
            f"  labels: {{severity: {rule.severity or severity}}}",
            "  annotations:",
            f"    summary: {json.dumps(rule.summary, ensure_ascii=False)}",
            f"    fix: {json.dumps(rule.fix or fix, ensure_ascii=False)}",
        ]
    return indent("\n".join(lines), "      ") + "\n"


def _expression(text: str) -> str:
    """Return an expression over the series that are scraped from a monitor alone."""
    own = METRIC.sub(lambda m: f'{m[1]}{{job="skerry"' + (", " if m[2] else "}"), text.strip())
    return own.replace("RUN", "job, instance, run")


def main() -> None:
    """Write the file, or with ``--check`` exit with 1 where it is not what the table says."""
    check, path = "--check" in sys.argv, Path(sys.argv[-1])
    if not check:
        path.write_text(rendered(), encoding="utf-8")
    elif path.read_text(encoding="utf-8") != rendered():
        sys.exit(f"{path} is not what the table of alerts says: run this without --check.")


if __name__ == "__main__":
    main()
