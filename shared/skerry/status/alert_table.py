"""What may be wrong with a run: one table for the page, for ``skerry top`` and for Prometheus.

The file of Prometheus rules is generated from it by ``skerry.status.rules``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from skerry.status.recent import (
    FIRST_S,
    LATE_ROUNDS,
    LATE_S,
    LEAST_GOODPUT,
    RECENT_S,
    WAITED_S,
    WINDOW_S,
    WORSE,
)

FLAPS = 3
LATE_CHECKPOINTS = 5.0
"""A checkpoint that lacks commits is too old after so many times the time in which one is due,"""
CHECKPOINT_S = 120.0
"""and never before this time."""
NEARLY_FULL = 0.9


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
class Rule:
    """A Prometheus rule: see ``skerry.status.rules``. One without a ``summary`` records a series.

    ``for_`` is for how long it must hold. ``severity`` and ``fix`` are its alert's unless given.
    """

    name: str
    expr: str
    summary: str = ""
    for_: str = ""
    severity: Severity | None = None
    fix: str = ""


@dataclass(frozen=True, slots=True)
class AlertKind:
    """What may be wrong with a run: on the page and in ``skerry top``, and for Prometheus."""

    key: str
    severity: Severity
    fix: str
    rules: tuple[Rule, ...] = ()

    def alert(
        self, text: str, *, of: str = "", severity: Severity | None = None, fix: str = ""
    ) -> Alert:
        """Return what is wrong now; ``of`` tells it from others of its kind."""
        return Alert(f"{self.key}{of}", severity or self.severity, text, fix or self.fix)


GOING = "and on (RUN) skerry_run_finished == 0"
MINUTES = f"{RECENT_S / 60:.0f}m"
WINDOW = f"{WINDOW_S / 60:.0f}m"
WORKED = "run:skerry_learner_worked:seconds"
MISSED = "run:skerry_round_missed:seconds"
OF_RUN = "Run {{ $labels.run }}"
VALUE, SPAN, SHARE = (
    "{{ $value }}",
    "{{ $value | humanizeDuration }}",
    "{{ $value | humanizePercentage }}",
)
FULL = "remove the streams of runs that are over: a full store takes no more commits."

RECORDS = (
    # Time of processes that live: of learners that are down other alerts tell.
    Rule(
        "run:skerry_goodput:ratio_rate15m",
        f"""
sum by (RUN) (rate(skerry_learner_time_seconds_total{{use="train"}}[{WINDOW}]))
/ (sum by (RUN) (rate(skerry_learner_time_seconds_total[{WINDOW}])) > 0)""",
    ),
    # For how long a learner that is there has been ready, starting and catching up aside: while a
    # run rests nothing is due, and the first to come back must not look hours late.
    Rule(
        WORKED,
        """
max by (RUN) (
  sum by (RUN, learner) (skerry_learner_time_seconds_total{use!~"compile|recover"})
  and on (RUN, learner) skerry_learner_silence_seconds < 120
)""",
    ),
    Rule(
        MISSED,
        f"""
max by (RUN) (skerry_round_commit_age_seconds) <= {WORKED}
or {WORKED} < max by (RUN) (skerry_round_commit_age_seconds)""",
    ),
)

MONITOR = AlertKind(
    "monitor",
    Severity.CRITICAL,
    "Start it again with the same command: it rebuilds what it knows from the log.",
    (
        Rule(
            "SkerryMonitorDown",
            'up{job="skerry"} == 0',
            "The health monitor at {{ $labels.instance }} does not answer: its run is not watched.",
            "1m",
        ),
    ),
)
BROKER = AlertKind(
    "broker",
    Severity.CRITICAL,
    "Start it again; everybody catches up by themselves.",
    (
        Rule(
            "SkerryBrokerDown",
            "skerry_broker_up == 0",
            "Broker {{ $labels.server }} does not answer on its monitoring port.",
            "30s",
            fix="Start it again: learners go on training meanwhile, and everybody catches up.",
        ),
    ),
)
NO_COMMIT = AlertKind(
    "no-commit",
    Severity.CRITICAL,
    "Start a syncer if none runs, or look at its log; learners keep their progress meanwhile.",
    (
        # Before the first rounds everybody compiles: then it takes longer to be an alert.
        Rule(
            "SkerryNoCommit",
            f"""
{MISSED}
  > {LATE_ROUNDS:g} * max by (RUN) (skerry_round_interval_seconds)
and (
  {MISSED} > {FIRST_S:g}
  or {MISSED} > {LATE_S:g}
    and on (RUN) sum by (RUN) (skerry_round_duration_seconds_count) > 2
)
{GOING}""",
            f"{OF_RUN}: no commit for {SPAN}, which is more than ten rounds.",
            "30s",
            fix="Look at the syncer's log,"
            " and whether as many learners as the quorum asks for are alive.",
        ),
        # Without parameters no learner trains, so that no round is expected: no syncer was started.
        Rule(
            "SkerryLearnersWait",
            f"""
skerry_round_commit_age_seconds > {WAITED_S:g}
and on (RUN)
  max by (RUN) (rate(skerry_learner_time_seconds_total{{use="recover"}}[5m])) > 0.9
unless on (RUN) skerry_round_interval_seconds
unless on (RUN) skerry_run_finished == 1""",
            f"{OF_RUN}: learners wait for parameters, and nothing was committed for {SPAN}.",
            "30s",
            fix="Start a syncer if none runs, or look at its log.",
        ),
    ),
)
GONE = AlertKind(
    "gone",
    Severity.WARNING,
    "They come back by themselves if their processes still run. If not, start them again under"
    " the same names: they go on from the log.",
    (
        Rule(
            "SkerryNobodyTrains",
            f"""
sum by (RUN) (skerry_learners{{state="alive"}}) == 0
{GOING}""",
            f"{OF_RUN}: no learner is alive.",
            "2m",
            Severity.CRITICAL,
            "Start learners; under the same names they go on from the log.",
        ),
        # A name is never forgotten: one whose place a newer name has taken is not missed.
        Rule(
            "SkerryLearnerGone",
            f"""
skerry_learners_missed > 0
{GOING}""",
            f"{OF_RUN}: {VALUE} of its learners gone.",
            "1m",
            fix="Start them again under the same names: each goes on from the log.",
        ),
    ),
)
SUSPECT = AlertKind("suspect", Severity.INFO, "Nothing yet: rounds do not wait for them.")
FLAPPING = AlertKind(
    "flapping-",
    Severity.WARNING,
    "Read the end of its log: it dies of the same thing each time.",
    (
        # Changes and not their sum: the members of a run restored under its id begin from 1.
        Rule(
            "SkerryLearnerFlapping",
            f"changes(skerry_learner_incarnation[{MINUTES}]) >= {FLAPS}",
            f"{OF_RUN}: {{{{ $labels.learner }}}} was started {VALUE} times within ten minutes.",
        ),
    ),
)
LOSS = AlertKind(
    "loss",
    Severity.CRITICAL,
    "Such steps are skipped and weigh nothing. If it is alone, look at its data and its hardware;"
    " lower train.lr if all diverge.",
    (
        Rule(
            "SkerryLossNotFinite",
            f"""
skerry_learner_diverged == 1
{GOING}""",
            f"{OF_RUN}: the loss of {{{{ $labels.learner }}}} is not finite.",
            "30s",
        ),
    ),
)
HELD_OUT = AlertKind(
    "held-out",
    Severity.WARNING,
    "Go back to a checkpoint from before: skerry up --from.",
    (
        # Three evaluations in a row, however long ago: the monitor knows which they are, and the
        # best of this run on the same text. A range of time knows neither.
        Rule(
            "SkerryHeldOutLossWorse",
            f"""
skerry_held_out_recent > {1 + WORSE:g} * skerry_held_out_best
{GOING}""",
            f'{OF_RUN}: held-out loss {{{{ printf "%.3f" $value }}}} ({{{{ $labels.evaluator }}}})'
            " is well above its best.",
            "1m",
        ),
    ),
)
TEXTS = AlertKind(
    "texts",
    Severity.WARNING,
    "Give all of them the same text.",
    (
        Rule(
            "SkerryEvaluatorsDisagree",
            f"""
skerry_held_out_texts > 1
{GOING}""",
            f"{OF_RUN}: evaluators read {VALUE} different texts, whose losses cannot be compared.",
            "1m",
        ),
    ),
)
GOODPUT = AlertKind(
    "goodput",
    Severity.WARNING,
    "The split of the learners' time says where the rest went.",
    (
        Rule(
            "SkerryGoodputLow",
            f"""
run:skerry_goodput:ratio_rate15m < {LEAST_GOODPUT:g}
{GOING}""",
            f"{OF_RUN}: goodput of the last 15 minutes is {SHARE}.",
            "10m",
            fix="The split of the learners' time (skerry_learner_time_seconds_total by use) says"
            " where the rest went.",
        ),
    ),
)
REFUSED = AlertKind(
    "refused",
    Severity.WARNING,
    "too_stale: the learner is slower than sync.max_staleness allows; others: see the syncer's"
    " log.",
    (
        Rule(
            "SkerryContributionsRefused",
            f"""
sum by (RUN, cause) (
  increase(skerry_contributions_total{{outcome="refused"}}[{MINUTES}])
) > 0""",
            f"{OF_RUN}: contributions were refused as {{{{ $labels.cause }}}} within ten minutes.",
            fix="too_stale: a learner is slower than sync.max_staleness allows; for others see the"
            " syncer's log.",
        ),
    ),
)
CHECKPOINT = AlertKind(
    "checkpoint",
    Severity.WARNING,
    "Look at the checkpointer's log and at the room where it writes.",
    (
        # One that holds every commit is as new as it can be, however long ago it was written, and
        # of one that lacks some it counts since when: after an outage the first commit is new.
        Rule(
            "SkerryCheckpointTooOld",
            f"""
skerry_checkpoint_age_seconds
and skerry_checkpoint_behind_time_seconds > {CHECKPOINT_S:g}
and skerry_checkpoint_behind_time_seconds
  > {LATE_CHECKPOINTS:g} * skerry_checkpoint_interval_seconds
and on (RUN) {WORKED} > {CHECKPOINT_S:g}
and on (RUN) {WORKED} > {LATE_CHECKPOINTS:g} * skerry_checkpoint_interval_seconds
and skerry_run_finished == 0""",
            f"{OF_RUN}: the newest checkpoint is {SPAN} old.",
            "1m",
            fix="Look at the checkpointer's log, and at the room where it writes.",
        ),
    ),
)
STORE = AlertKind(
    "store-",
    Severity.CRITICAL,
    f"Raise the account's limit, or {FULL}",
    (
        # The only stream with a limit of its own, the window of contributions, drops its oldest by
        # design: what fills up is the store that all of them share, or an account's share of it.
        Rule(
            "SkerryBrokerStoreNearLimit",
            f"""
skerry_broker_storage_bytes
/ (skerry_broker_storage_limit_bytes > 0) > {NEARLY_FULL:g}""",
            f"Broker {{{{ $labels.server }}}}: its {{{{ $labels.storage }}}} store is {SHARE}"
            " full.",
            "1m",
            fix=f"Raise max_{{{{ $labels.storage }}}}_store, or {FULL}",
        ),
        Rule(
            "SkerryAccountNearLimit",
            f"""
skerry_account_storage_bytes
/ (skerry_account_storage_limit_bytes > 0) > {NEARLY_FULL:g}""",
            f"{OF_RUN}: the {{{{ $labels.storage }}}} store of its NATS account is {SHARE} full.",
            "1m",
        ),
    ),
)
READER = AlertKind(
    "reader",
    Severity.WARNING,
    "Find the slow one: `nats consumer report` on that stream.",
    (
        Rule(
            "SkerryReaderBehind",
            "skerry_stream_lag > 10000",
            f"{OF_RUN}: a reader of stream {{{{ $labels.stream }}}} is {VALUE} messages behind.",
            "10m",
        ),
    ),
)
MALFORMED = AlertKind(
    "malformed",
    Severity.WARNING,
    "Run `skerry ledger verify`; somebody may run another version of Skerry.",
    (
        Rule(
            "SkerryMalformed",
            f"""
sum by (RUN, message) (increase(skerry_monitor_malformed_total[{MINUTES}])) > 0""",
            f"{OF_RUN}: records of kind {{{{ $labels.message }}}} could not be read.",
            fix="Run `skerry ledger verify`; somebody may run another version of Skerry, or write"
            " who should not.",
        ),
    ),
)
ALERTS = (
    *(MONITOR, BROKER, NO_COMMIT, GONE, SUSPECT, FLAPPING, LOSS, HELD_OUT, TEXTS, GOODPUT),
    *(REFUSED, CHECKPOINT, STORE, READER, MALFORMED),
)
"""What the page and ``skerry top`` say, and what Prometheus can tell from a scrape alone."""
