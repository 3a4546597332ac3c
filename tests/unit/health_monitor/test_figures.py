"""What ``/metrics`` says: every metric of the table that is the monitor's, and nothing untrue."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.liveness import LivenessPolicy
from skerry.log.base import Retention, Room, Storage, StreamInfo, StreamSpec
from skerry.protocol.messages import (
    CheckpointRecord,
    CloseReason,
    Commit,
    CommitOrigin,
    Evaluation,
    LearnerPhase,
    Pulse,
    RefusalCause,
)
from skerry.settings.models import RunConfig
from skerry.status.commit_totals import CommitTotals
from skerry.status.model import RunModel
from skerry.status.recent import STARTING_S
from skerry.status.report import report
from skerry.status.sources import MOST_LEARNERS, MessageCounts
from skerry.status.view import RunShape, RunView, fold, peek
from skerry.telemetry import metrics
from skerry.telemetry.metrics import Metric, MetricKind, of, prometheus_name
from skerry.telemetry.points import Point, Spread, flat
from skerry_health_monitor.metrics.broker import Server
from skerry_health_monitor.metrics.figures import Known, figures, interval_s
from skerry_health_monitor.metrics.prometheus import exposition
from tests.support.builders import (
    checkpoint_record,
    commit,
    consumed,
    evaluation,
    member,
    ns,
    pulse,
    refused,
    run_record,
)

if TYPE_CHECKING:
    from skerry.telemetry.points import Figure

NOW_S = 1_000_000.0
TRACE = "0af7651916cd43dd8448eb211c80319c"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
CONFIG = RunConfig()
CUT = plan([LeafSpec("w", (8, 8))], 1)

PULSE = pulse(
    step=40,
    incarnation=2,
    sent_ns=ns(NOW_S),
    steps=30,
    tokens=3000,
    cursor=240,
    loss=2.5,
    step_time_s=0.5,
    busy_s=15.0,
    alive_s=20.0,
    bytes_up=10,
    bytes_down=20,
    contributions=4,
    max_staleness=1,
    syncs_skipped=2,
    compile_s=2.0,
    f32_bytes_up=80,
    f32_bytes_down=60,
    encode_s=0.25,
    decode_s=0.125,
)


def closed(version: int = 2, **changes: Any) -> Commit:
    merged = tuple(consumed(identity=n, staleness=n, steps=9, tokens=90) for n in range(3))
    times = {"opened_ns": ns(NOW_S - 5), "closed_ns": ns(NOW_S - 2), "quorum_s": 2.0}
    base: dict[str, Any] = {
        "consumed": merged,
        "grace_s": 0.75,
        "merge_s": 0.5,
        "trace_id": TRACE,
        **times,
    }
    return commit(version, **(base | changes))


def judged(**changes: Any) -> Evaluation:
    losses = {"loss": 3.25, "perplexity": 25.0, "bits_per_byte": 4.0}
    base: dict[str, Any] = {"tokens": 90, "evaluated_ns": ns(NOW_S), **losses}
    return evaluation(**(base | changes))


def view(*messages: Pulse | Commit | CheckpointRecord | Evaluation) -> RunView:
    empty = RunView(
        RunShape("r", 1, 1, 100, None, LivenessPolicy(0.5, 3.0, 8.0)), created_s=NOW_S - 60
    )
    return reduce(lambda seen, message: fold(seen, message, NOW_S), messages, empty)


def known(seen: RunView, *commits: Commit) -> Known:
    model = RunModel(run_record("r", CUT), CONFIG, lambda: NOW_S)
    model.view = seen
    for message in commits:
        model.totals.take(message)
    spec = StreamSpec("SKERRY_r_STATE", (), Retention.LAST_PER_SUBJECT, Storage.FILE, 1000)
    return Known(
        model,
        MessageCounts(Counter(pulse=1), Counter(pulse=3)),
        [StreamInfo("SKERRY_r_STATE", 7, 900, 1, 7, spec)],
        [Room(Storage.FILE, 950, 1000), Room(Storage.MEMORY, 30)],
    )


SERVER = Server("n1", up=True, most_memory_bytes=10, most_file_bytes=20, lags={"SKERRY_r_STATE": 5})


def everything() -> list[Figure]:
    genesis, second = closed(1), closed(refused=(refused(learner="b"),))
    seen = view(
        PULSE,
        genesis,
        second,
        checkpoint_record("/c", written_ns=ns(NOW_S - 9)),
        judged(),
    )
    return figures(known(seen, genesis, second), [SERVER], NOW_S)


def values(found: list[Figure], metric: Metric) -> dict[tuple[str, ...], float]:
    return {f.labels: f.value for f in found if isinstance(f, Point) and f.metric is metric}


def test_every_metric_of_the_table_that_is_the_monitors_is_told_and_no_other() -> None:
    assert {f.metric for f in everything()} == set(of("health-monitor"))


def test_every_label_of_the_table_has_a_value() -> None:
    for figure in everything():
        assert len(figure.labels) == len(figure.metric.attributes), figure.metric.name


def test_no_two_figures_are_the_same_series() -> None:
    names = [(f.metric.name, f.labels) for f in everything()]
    assert len(names) == len(set(names))


def test_counters_of_a_learner_are_those_of_its_newest_incarnation() -> None:
    first = replace(PULSE, incarnation=1, tokens=9000, sent_ns=round((NOW_S - 30) * 1e9))
    found = figures(known(view(first, PULSE)), [], NOW_S)
    assert values(found, metrics.TOKENS) == {("r", "a"): 3000}
    assert values(found, metrics.LEARNER_INCARNATION) == {("r", "a"): 2}


def test_a_learners_time_is_all_accounted_for() -> None:
    told = values(everything(), metrics.LEARNER_TIME)
    assert told["r", "a", "train"] == 15.0
    assert told["r", "a", "idle"] == 3.0
    assert sum(told.values()) == PULSE.alive_s
    assert ("r", "a", "down") not in told


def test_what_the_codec_and_the_merge_took_is_told() -> None:
    found = everything()
    assert values(found, metrics.CODEC_TIME) == {
        ("r", "a", "encode"): 0.25,
        ("r", "a", "decode"): 0.125,
    }
    (merge,) = [f for f in found if isinstance(f, Spread) and f.metric is metrics.MERGE_DURATION]
    assert (merge.count, merge.total) == (1, 0.5)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_no_number_spoils_no_sum(odd: float) -> None:
    sums = CommitTotals("r")
    sums.take(replace(closed(2), merge_s=odd, grace_s=odd, quorum_s=odd))
    sums.take(closed(3))
    told = {f.metric: f for f in sums.figures() if isinstance(f, Spread)}
    assert told[metrics.MERGE_DURATION].total == 0.5
    assert told[metrics.GRACE_WAIT].total == 0.75
    assert told[metrics.QUORUM_WAIT].count == 1


def test_goodput_and_badput_are_all_there_is() -> None:
    found = everything()
    badput = values(found, metrics.BADPUT)
    whole = sum(badput.values()) + values(found, metrics.GOODPUT)["r",]
    assert whole == pytest.approx(1.0)
    assert ("r", "down") in badput


def test_contributions_are_told_by_what_became_of_them() -> None:
    told = values(everything(), metrics.CONTRIBUTIONS)
    assert {labels: count for labels, count in told.items() if count} == {
        ("r", "accepted", ""): 1,
        ("r", "stale", ""): 2,
        ("r", "refused", "too_stale"): 1,
    }


def test_the_interval_of_rounds_is_expected_of_learners_that_stand_still_too() -> None:
    row = report(view(PULSE), NOW_S).learners[0]
    still = replace(row, tokens_per_s=0.0)
    assert interval_s(CONFIG, [still]) == interval_s(CONFIG, [row]) is not None


def test_who_has_finished_is_there_and_waits_for_the_last_rounds() -> None:
    done = replace(PULSE, phase=LearnerPhase.FINISHED)
    found = figures(known(view(done)), [], NOW_S)
    assert values(found, metrics.LEARNERS)["r", "alive"] == 1
    assert values(found, metrics.ROUND_INTERVAL) == {("r",): CONFIG.sync.round_timeout_s}
    slow = report(view(replace(done, step_time_s=1e4)), NOW_S).learners
    assert interval_s(CONFIG, slow) == CONFIG.sync.h_steps * 1e4 / CONFIG.sync.fragments
    left = figures(known(view(done)), [], NOW_S + 900)
    assert set(values(left, metrics.LEARNERS).values()) == {0}
    assert values(left, metrics.ROUND_INTERVAL) == {}
    coming = replace(PULSE, learner="b", phase=LearnerPhase.CATCHING_UP)
    assert interval_s(CONFIG, report(view(done, coming), NOW_S).learners) is None
    hung = report(view(done, replace(coming, phase=LearnerPhase.STARTING)), NOW_S).learners
    assert interval_s(CONFIG, hung) == STARTING_S / 10
    training = replace(PULSE, learner="b")
    assert interval_s(CONFIG, report(view(done, training), NOW_S).learners) == interval_s(
        CONFIG, report(view(training), NOW_S).learners
    )


def test_an_account_without_a_limit_is_told_of_without_one() -> None:
    found = everything()
    assert values(found, metrics.ACCOUNT_STORAGE) == {("r", "file"): 950, ("r", "memory"): 30}
    assert values(found, metrics.ACCOUNT_STORAGE_LIMIT) == {("r", "file"): 1000}


def test_what_has_not_happened_yet_is_told_of_as_0_so_that_its_first_time_is_seen() -> None:
    found = figures(known(view(PULSE)), [], NOW_S)
    assert values(found, metrics.CONTRIBUTIONS)["r", "refused", "too_stale"] == 0
    counts = MessageCounts(Counter(pulse=1))
    found = figures(replace(known(view(PULSE)), counts=counts), [], NOW_S)
    assert values(found, metrics.MONITOR_MALFORMED) == {("r", "pulse"): 0}


def test_a_run_without_a_commit_has_waited_for_one_since_it_was_created() -> None:
    found = figures(known(view(PULSE)), [], NOW_S)
    assert values(found, metrics.COMMIT_AGE) == {("r",): 60.0}


def test_a_second_offer_of_initial_parameters_is_no_refusal() -> None:
    sums = CommitTotals("r")
    sums.take(closed(refused=(refused(RefusalCause.GENESIS, "b"),)))
    found = [f for f in sums.figures() if isinstance(f, Point) and f.labels[1] == "refused"]
    assert sum(f.value for f in found) == 0


def test_restored_parameters_are_no_round_of_no_time_with_a_path_for_a_reason() -> None:
    sums = CommitTotals("r")
    sums.take(closed(40, origin=CommitOrigin.RESTORED, source="/checkpoints/40"))
    assert [f for f in sums.figures() if isinstance(f, Spread) and f.count] == []


def test_a_round_that_never_had_its_quorum_counts_in_no_wait_for_it() -> None:
    sums = CommitTotals("r")
    sums.take(closed(2, reason=CloseReason.TIMEOUT))
    counted = {f.metric for f in sums.figures() if isinstance(f, Spread) and f.count}
    assert metrics.ROUND_DURATION in counted
    assert not counted & {metrics.QUORUM_WAIT, metrics.GRACE_WAIT}


def test_sums_of_the_ledger_are_left_out_while_its_history_is_still_read() -> None:
    half = known(peek(view(PULSE), closed(9), NOW_S))
    told = {f.metric for f in figures(half, [], NOW_S)}
    assert metrics.ROUND_DURATION not in told
    assert metrics.CONTRIBUTIONS not in told
    assert metrics.FRAGMENT_VERSION in told


def test_a_commit_that_was_counted_changes_nothing() -> None:
    once, twice = CommitTotals("r"), CommitTotals("r")
    once.take(closed())
    for _ in range(2):
        twice.take(closed())
    assert flat(once.figures()) == flat(twice.figures())


def test_names_out_of_the_log_cannot_become_series_without_end() -> None:
    many = [replace(PULSE, learner=f"l{n}") for n in range(MOST_LEARNERS + 50)]
    assert len(values(figures(known(view(*many)), [], NOW_S), metrics.TOKENS)) == MOST_LEARNERS


def test_the_interval_between_commits_follows_the_learners_speed() -> None:
    seen = view(PULSE)
    told = values(figures(known(seen), [], NOW_S), metrics.ROUND_INTERVAL)
    assert told == {("r",): CONFIG.sync.h_steps * 0.5 / CONFIG.sync.fragments}
    assert interval_s(CONFIG, []) is None


def test_who_is_missed_is_counted() -> None:
    old = replace(PULSE, sent_ns=round((NOW_S - 900) * 1e9))
    silent, another = (replace(old, learner=name) for name in ("b", "c"))
    joined = member("new", joined_ns=ns(NOW_S), shard=3)
    there = view(PULSE, silent, another)
    found = figures(known(there), [], NOW_S)
    assert values(found, metrics.LEARNERS_MISSED) == {("r",): 2}
    found = figures(known(fold(there, joined, NOW_S)), [], NOW_S)
    assert values(found, metrics.LEARNERS_MISSED) == {("r",): 1}


def test_a_checkpoint_is_due_no_more_often_than_rounds_come() -> None:
    found = figures(known(view(PULSE, closed())), [], NOW_S)
    assert values(found, metrics.CHECKPOINT_INTERVAL) == {("r",): CONFIG.checkpoint.every_s}
    assert values(found, metrics.CHECKPOINT_BEHIND) == {("r",): 2}
    assert values(found, metrics.CHECKPOINT_BEHIND_TIME) == {("r",): 2}
    slow = figures(known(view(replace(PULSE, step_time_s=500.0))), [], NOW_S)
    (due_s,) = values(slow, metrics.CHECKPOINT_INTERVAL).values()
    assert due_s == CONFIG.sync.h_steps * 500.0 / CONFIG.sync.fragments


def test_who_diverges_and_how_many_texts_are_read_is_told() -> None:
    sick = replace(PULSE, learner="b", loss=math.nan)
    text = judged()
    other = replace(text, evaluator="f", text_digest=8)
    found = figures(known(view(PULSE, sick, text, other)), [], NOW_S)
    assert values(found, metrics.LEARNER_DIVERGED) == {("r", "a"): 0, ("r", "b"): 1}
    assert values(found, metrics.HELD_OUT_TEXTS) == {("r",): 2}


def test_held_out_loss_is_told_with_what_it_is_judged_by() -> None:
    losses = (9.0, 2.0, 3.0, 2.5, 4.0)
    read = [judged(loss=loss, versions=(n,), evaluated_ns=n) for n, loss in enumerate(losses, 1)]
    new_text = replace(read[0], versions=(9,), text_digest=8, loss=7.0)
    for evaluations, told in ((read, (4.0, 2.0, 2.5)), ([*read, new_text], (7.0, 7.0, 7.0))):
        found = figures(known(view(PULSE, *evaluations)), [], NOW_S)
        both = (metrics.HELD_OUT_LOSS, metrics.HELD_OUT_BEST, metrics.HELD_OUT_RECENT)
        assert [values(found, metric) for metric in both] == [{("r", "e"): loss} for loss in told]


def test_before_there_is_a_run_only_the_broker_is_told_of() -> None:
    assert flat(figures(None, [replace(SERVER, up=False)], NOW_S)) == {
        "skerry.broker.up{server=n1}": 0
    }


def test_a_scrape_reads_back_as_the_table_says() -> None:
    text, kind = exposition(everything())
    assert kind.startswith("text/plain")
    families = {f.name: f for f in text_string_to_metric_families(text.decode())}
    for metric in of("health-monitor"):
        family = families[prometheus_name(metric).removesuffix("_total")]
        assert family.documentation == metric.description
        assert family.type == metric.kind.value
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.attributes)


def test_a_round_leads_to_its_trace() -> None:
    text, kind = exposition(everything(), OPEN_METRICS)
    assert kind.startswith("application/openmetrics-text")
    families = {f.name: f for f in open_metrics_families(text.decode())}
    traces = {
        sample.exemplar.labels["trace_id"]
        for sample in families["skerry_round_duration_seconds"].samples
        if sample.exemplar is not None
    }
    assert traces == {TRACE}


def test_a_hostile_name_is_a_label_and_nothing_more() -> None:
    name = 'x"} 1\nskerry_run_step{run="r"} 666\\'
    text, _ = exposition(figures(known(view(replace(PULSE, learner=name))), [], NOW_S))
    families = {f.name: f for f in text_string_to_metric_families(text.decode())}
    assert [s.labels["learner"] for s in families["skerry_step_time_seconds"].samples] == [name]
    assert [s.value for s in families["skerry_run_step"].samples] == [40]


def test_a_name_beyond_all_bounds_is_cut_and_of_two_that_then_agree_one_is_told() -> None:
    long = [replace(PULSE, learner="x" * 500 + str(n)) for n in range(2)]
    text, _ = exposition(figures(known(view(*long)), [], NOW_S))
    families = {f.name: f for f in text_string_to_metric_families(text.decode())}
    (sample,) = families["skerry_step_time_seconds"].samples
    assert sample.labels["learner"] == "x" * 128


def test_buckets_hold_their_upper_bound_and_add_up() -> None:
    spread = Spread(metrics.STALENESS, ("r",))
    for behind in (0, 0, 1, 99):
        spread.add(behind)
    text, _ = exposition([spread])
    (family,) = text_string_to_metric_families(text.decode())
    told = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (told["0.0"], told["1.0"], told["16.0"], told["+Inf"]) == (2, 3, 3, 4)
    assert {s.name[-4:]: s.value for s in family.samples if "bucket" not in s.name} == {
        "ount": 4,
        "_sum": 100,
    }


def test_names_in_prometheus_follow_opentelemetrys_rule() -> None:
    told = {m.name: prometheus_name(m) for m in metrics.ALL}
    assert told["skerry.round.duration"] == "skerry_round_duration_seconds"
    assert told["skerry.wire.io"] == "skerry_wire_io_bytes_total"
    assert told["skerry.goodput.ratio"] == "skerry_goodput_ratio"
    assert told["skerry.loss"] == "skerry_loss"
    assert told["skerry.contributions"] == "skerry_contributions_total"
    assert len(set(told.values())) == len(metrics.ALL)


def test_a_histogram_has_bounds_and_nothing_else_has() -> None:
    for metric in metrics.ALL:
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM), metric.name
        assert tuple(sorted(metric.buckets)) == metric.buckets
