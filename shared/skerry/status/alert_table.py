"""What may be wrong with a run: one table for the page, for ``skerry top`` and for Prometheus.

``skerry.status.alerts`` decides what holds. The health monitor exports that as ``skerry.alert``,
from which Prometheus' rules are made: ``python -m skerry.status.alert_table``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

FULL = "remove the streams of runs that are over: a full store takes no more commits."


class Severity(StrEnum):
    """``info`` explains, ``warning`` costs goodput, ``critical`` stops training or loses work."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """How bad it is: the worse, the higher."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Alert:
    """One sentence that says what is wrong and one that says what to do; ``key`` names it."""

    key: str
    severity: Severity
    text: str
    fix: str


@dataclass(frozen=True, slots=True)
class AlertKind:
    """What may be wrong with a run, and the rule by which Prometheus reports it.

    ``rule`` names that rule, if there is one; it says ``summary`` once it has held for ``for_``.
    Kinds with an expression (``expr``) of their own are in Prometheus only.
    """

    key: str
    severity: Severity
    fix: str
    rule: str = ""
    summary: str = ""
    for_: str = "1m"
    expr: str = ""

    def alert(
        self, text: str, *, of: str = "", severity: Severity | None = None, fix: str = ""
    ) -> Alert:
        """Return what is wrong now; ``of`` tells it from others of its kind."""
        return Alert(f"{self.key}{of}", severity or self.severity, text, fix or self.fix)


BROKER = AlertKind(
    "broker", Severity.CRITICAL, "Start it again; everybody catches up by themselves."
)
NO_COMMIT = AlertKind(
    "no-commit",
    Severity.CRITICAL,
    "Start a syncer if none runs, or look at its log; learners keep their progress meanwhile.",
    "SkerryNoCommit",
    "no round has been committed for too long.",
)
GONE = AlertKind(
    "gone",
    Severity.WARNING,
    "They come back by themselves if their processes still run. If not, start them again under"
    " the same names: they go on from the log.",
    "SkerryLearnerGone",
    "learners are gone.",
)
SUSPECT = AlertKind("suspect", Severity.INFO, "Nothing yet: rounds do not wait for them.")
QUARANTINED = AlertKind(
    "quarantine",
    Severity.WARNING,
    "Look at its machine, its data and its release of Skerry. `skerry quarantine NAME --release`"
    " merges it again; until then what it learns is lost.",
    "SkerryLearnerQuarantined",
    "a learner is in quarantine.",
)
FLAPPING = AlertKind(
    "flapping-",
    Severity.WARNING,
    "Read the end of its log: it dies of the same thing each time.",
    "SkerryLearnerFlapping",
    "a learner is started again and again ({{ $labels.alert }}).",
)
LOSS = AlertKind(
    "loss",
    Severity.CRITICAL,
    "Such steps are skipped and weigh nothing. If it is alone, look at its data and its hardware;"
    " lower train.lr if all diverge.",
    "SkerryLossNotFinite",
    "the loss of a learner is not finite.",
)
MISMATCH = AlertKind(
    "mismatch",
    Severity.WARNING,
    "They read it again and go on. Give all machines the same release of Skerry; if it happens on"
    " one machine alone, have its memory checked.",
    "SkerryGlobalFragmentDiffers",
    "a learner made of deltas what was not committed.",
)
HELD_OUT = AlertKind(
    "held-out",
    Severity.WARNING,
    "Go back to a checkpoint from before: skerry up --from.",
    "SkerryHeldOutLossWorse",
    "held-out loss is well above its best.",
)
TEXTS = AlertKind(
    "texts",
    Severity.WARNING,
    "Give all of them the same text.",
    "SkerryEvaluatorsDisagree",
    "evaluators read different texts, whose losses cannot be compared.",
)
GOODPUT = AlertKind(
    "goodput",
    Severity.WARNING,
    "The split of the learners' time says where the rest went.",
    "SkerryGoodputLow",
    "goodput of the last 15 minutes is low.",
    "10m",
)
REFUSED = AlertKind(
    "refused",
    Severity.WARNING,
    "too_stale: the learner is slower than sync.max_staleness allows; others: see the syncer's"
    " log.",
    "SkerryContributionsRefused",
    "contributions were refused within ten minutes.",
)
CHECKPOINT = AlertKind(
    "checkpoint",
    Severity.WARNING,
    "Look at the checkpointer's log and at the room where it writes.",
    "SkerryCheckpointTooOld",
    "the newest checkpoint is too old.",
)
STORE = AlertKind(
    "store-",
    Severity.CRITICAL,
    f"Raise the account's limit, or {FULL}",
    "SkerryStoreNearLimit",
    "a store of the broker or of its account is nearly full ({{ $labels.alert }}).",
)
MALFORMED = AlertKind(
    "malformed",
    Severity.WARNING,
    "Run `skerry ledger verify`; somebody may run another version of Skerry, or write who should"
    " not.",
    "SkerryMalformed",
    "records could not be read.",
)
OF_PROMETHEUS = (
    AlertKind(
        "monitor",
        Severity.CRITICAL,
        "Start it again with the same command: it rebuilds what it knows from the log.",
        "SkerryMonitorDown",
        "The health monitor at {{ $labels.instance }} does not answer: its run is not watched.",
        expr='up{job="skerry"} == 0',
    ),
    AlertKind(
        "server",
        Severity.CRITICAL,
        "Start it again: learners go on training meanwhile, and everybody catches up.",
        "SkerryBrokerDown",
        "Broker {{ $labels.server }} does not answer on its monitoring port.",
        expr='skerry_broker_up{job="skerry"} == 0',
    ),
    AlertKind(
        "no-learners",
        Severity.CRITICAL,
        "Start learners; under the same names they go on from the log.",
        "SkerryNobodyTrains",
        "Run {{ $labels.run }}: no learner is alive.",
        "2m",
        'skerry_learners{job="skerry", state="alive"} == 0'
        ' and on (job, instance, run) skerry_run_finished{job="skerry"} == 0',
    ),
    AlertKind(
        "reader",
        Severity.WARNING,
        "Find the slow one: `nats consumer report` on that stream.",
        "SkerryReaderBehind",
        "Run {{ $labels.run }}: a reader of stream {{ $labels.stream }} is {{ $value }} messages"
        " behind.",
        "10m",
        'skerry_stream_lag{job="skerry"} > 10000',
    ),
)
"""What only Prometheus reports, from a scrape or from its absence."""
ALERTS = tuple(value for value in tuple(globals().values()) if isinstance(value, AlertKind))
"""What the page and ``skerry top`` say, and the monitor exports."""

HEAD = """\
# What an operator wants to be woken for, or to find in the morning: what the health monitor's page
# says, and what only Prometheus sees. Generated from the table in skerry/status/alert_table.py:
# python -m skerry.status.alert_table > infra/prometheus/rules.yml
# Check and test: promtool test rules infra/prometheus/rules_test.yml
#
# severity: critical stops training or loses work, warning costs goodput.
groups:
  - name: skerry
    rules:
"""


def rules() -> str:
    """Return the file of Prometheus' rules."""
    return HEAD + "\n".join(_rule(kind) for kind in (*OF_PROMETHEUS, *ALERTS) if kind.rule)


def _rule(kind: AlertKind) -> str:
    """Return a rule; one that is made from ``skerry_alert`` has its severity from there."""
    key = f'=~"{kind.key}.*"' if kind.key.endswith("-") else f'="{kind.key}"'
    expr = kind.expr or f'skerry_alert{{job="skerry", alert{key}}} == 1'
    summary = kind.summary if kind.expr else f"Run {{{{ $labels.run }}}}: {kind.summary}"
    lines = [f"- alert: {kind.rule}", f"  expr: {expr}", f"  for: {kind.for_}"]
    lines += [f"  labels: {{severity: {kind.severity}}}"] if kind.expr else []
    lines += [
        "  annotations:",
        f"    summary: {json.dumps(summary)}",
        f"    fix: {json.dumps(kind.fix)}",
    ]
    return "".join(f"      {line}\n" for line in lines)


if __name__ == "__main__":
    print(rules(), end="")
