"""Every metric of the monitor is reported as the table says, bounded, in Prometheus' words."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log.base import Retention, Room, Storage, StreamInfo, StreamSpec
from skerry.log.streams import specs
from skerry.protocol.messages import (
    CloseReason,
    Commit,
    CommitOrigin,
    Evaluation,
    LearnerPhase,
    RefusalCause,
)
from skerry.settings.models import RunConfig
from skerry.status.commit_totals import CommitTotals
from skerry.status.model import RunModel
from skerry.status.sources import MOST_LEARNERS, MessageCounts, RunMessage
from skerry.telemetry import metrics
from skerry.telemetry.metrics import (
    Figure,
    Metric,
    Point,
    Spread,
    flat,
    of,
    prometheus_name,
)
from skerry_health_monitor.metrics.broker import Server, parsed
from skerry_health_monitor.metrics.exporting import exposition
from skerry_health_monitor.metrics.figures import figures
from tests.support.builders import (
    as_seen,
    checkpoint_record,
    commit,
    consumed,
    evaluation,
    ns,
    pulse,
    refused,
    run_record,
)

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
    region="eu",
    cached_bytes=15,
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


def model(*messages: RunMessage, later_s: float = 0.0) -> RunModel:
    time_s = [NOW_S]
    record = run_record("r", CUT, created_ns=ns(NOW_S - 60))
    found = RunModel(record, CONFIG, lambda: time_s[0])
    for number, message in enumerate(messages, 1):
        found.take(as_seen(message, NOW_S, number))
    time_s[0] += later_s
    return found


def reported(*messages: RunMessage, later_s: float = 0.0) -> list[Figure]:
    return figures(model(*messages, later_s=later_s).snapshot(), MessageCounts())


def values(found: list[Figure], metric: Metric) -> dict[tuple[str, ...], float]:
    return {f.labels: f.value for f in found if isinstance(f, Point) and f.metric is metric}


def value(metric: Metric, *messages: RunMessage, later_s: float = 0.0) -> float | None:
    return values(reported(*messages, later_s=later_s), metric).get(("r",))


VARZ: dict[str, Any] = dict.fromkeys(
    ("connections", "slow_consumers", "mem", "cpu", "in_msgs", "out_msgs", "in_bytes", "out_bytes"),
    1,
)
STREAM = {"name": "SKERRY_r_STATE_0", "consumer_detail": [{"num_pending": 5}, {"num_pending": 2}]}
JSZ: dict[str, Any] = {
    "config": {"max_memory": 10, "max_storage": 20},
    "account_details": [{"stream_detail": [STREAM]}],
}
SPEC = StreamSpec("SKERRY_r_STATE_0", (), Retention.LAST_PER_SUBJECT, Storage.FILE, 1000)


@pytest.fixture(scope="module")
def everything() -> list[Figure]:
    """The figures of a run in which everything has happened."""
    wrong = closed(refused=(refused(learner="b"),))
    saved = checkpoint_record("/c", written_ns=ns(NOW_S - 9))
    return figures(
        model(PULSE, closed(1), wrong, saved, judged()).snapshot(),
        MessageCounts(Counter(pulse=1), Counter(pulse=3)),
        [StreamInfo("SKERRY_r_STATE_0", 7, 900, 1, 7, SPEC)],
        [Room(Storage.FILE, 950, 1000), Room(Storage.MEMORY, 30)],
        [parsed(VARZ, JSZ, "n1")],
    )


def test_every_metric_of_the_monitor_is_reported_once_with_a_value_for_every_label(
    everything: list[Figure],
) -> None:
    assert {f.metric for f in everything} == set(of("health-monitor"))
    series = [(f.metric.name, f.labels) for f in everything]
    assert len(series) == len(set(series))
    assert all(len(f.labels) == len(f.metric.attributes) for f in everything)


def test_each_stream_of_a_run_has_a_series_of_its_own() -> None:
    held = [StreamInfo(spec.name, n, n, 1, n, spec) for n, spec in enumerate(specs("r", shards=2))]
    found = values(figures(model().snapshot(), MessageCounts(), held), metrics.STREAM_SIZE)
    kinds = ("LEDGER", "MEMBERS", "PULSE", "STATE_0", "CONTRIB_0", "STATE_1", "CONTRIB_1")
    assert found == {("r", kind): n for n, kind in enumerate(kinds)}


def test_counters_of_a_learner_are_those_of_its_newest_incarnation() -> None:
    first = replace(PULSE, incarnation=1, tokens=9000, sent_ns=ns(NOW_S - 30))
    found = reported(first, PULSE)
    assert values(found, metrics.TOKENS) == {("r", "a"): 3000}
    assert values(found, metrics.LEARNER_INCARNATION) == {("r", "a"): 2}


def test_a_learners_time_is_all_accounted_for(everything: list[Figure]) -> None:
    time_s = values(everything, metrics.LEARNER_TIME)
    assert (time_s["r", "a", "train"], time_s["r", "a", "idle"]) == (15.0, 3.0)
    assert sum(time_s.values()) == PULSE.alive_s
    assert ("r", "a", "down") not in time_s
    assert values(everything, metrics.CODEC_TIME) == {
        ("r", "a", "encode"): 0.25,
        ("r", "a", "decode"): 0.125,
    }


def test_goodput_and_badput_are_all_there_is(everything: list[Figure]) -> None:
    badput = values(everything, metrics.BADPUT)
    assert sum(badput.values()) + values(everything, metrics.GOODPUT)["r",] == pytest.approx(1.0)
    assert ("r", "down") in badput


def test_contributions_are_counted_by_what_became_of_them(everything: list[Figure]) -> None:
    counts = values(everything, metrics.CONTRIBUTIONS)
    assert {labels: count for labels, count in counts.items() if count} == {
        ("r", "accepted", ""): 1,
        ("r", "stale", ""): 2,
        ("r", "refused", "too_stale"): 1,
    }


def test_what_is_wrong_is_exported_for_prometheus(everything: list[Figure]) -> None:
    assert values(everything, metrics.ALERT) == {("r", "refused", "warning"): 1}


def test_a_learner_that_has_finished_is_there_until_it_is_gone() -> None:
    done = replace(PULSE, phase=LearnerPhase.FINISHED)
    assert values(reported(done), metrics.LEARNERS)["r", "alive"] == 1
    assert set(values(reported(done, later_s=900), metrics.LEARNERS).values()) == {0}


def test_an_account_without_a_limit_is_reported_without_one(everything: list[Figure]) -> None:
    assert values(everything, metrics.ACCOUNT_STORAGE) == {("r", "file"): 950, ("r", "memory"): 30}
    assert values(everything, metrics.ACCOUNT_STORAGE_LIMIT) == {("r", "file"): 1000}


def test_what_has_not_happened_yet_is_0_so_that_its_first_time_is_seen() -> None:
    counts = MessageCounts(Counter(pulse=1))
    found = figures(model(PULSE).snapshot(), counts)
    assert values(found, metrics.CONTRIBUTIONS)["r", "refused", "too_stale"] == 0
    assert values(found, metrics.MONITOR_MALFORMED) == {("r", "pulse"): 0}


def test_a_run_without_a_commit_has_waited_for_one_since_it_was_created() -> None:
    assert value(metrics.COMMIT_AGE, PULSE) == 60.0


def counted(*commits: Commit) -> dict[str, float]:
    sums = CommitTotals("r")
    for one in commits:
        sums.take(one)
    return {name: count for name, count in flat(sums.figures()).items() if count}


def test_a_time_that_is_no_number_spoils_no_sum() -> None:
    for odd in (math.nan, math.inf, -math.inf):
        found = counted(closed(2, merge_s=odd, grace_s=odd, quorum_s=odd), closed(3))
        assert found["skerry.merge.duration.sum"] == 0.5
        assert found["skerry.round.grace_wait.sum"] == 0.75
        assert found["skerry.round.quorum_wait.count"] == 1


def test_a_second_offer_of_initial_parameters_is_no_refusal() -> None:
    found = counted(closed(refused=(refused(RefusalCause.GENESIS, "b"),)))
    assert [name for name in found if "outcome=refused" in name] == []


def test_restored_parameters_are_no_round() -> None:
    assert counted(closed(40, origin=CommitOrigin.RESTORED, source="/checkpoints/40")) == {}


def test_a_round_that_never_had_its_quorum_counts_in_no_wait_for_it() -> None:
    found = counted(closed(2, reason=CloseReason.TIMEOUT))
    assert "skerry.round.duration{reason=timeout}.count" in found
    assert not {"skerry.round.quorum_wait.count", "skerry.round.grace_wait.count"} & found.keys()


def test_sums_of_the_ledger_are_left_out_while_its_history_is_still_read() -> None:
    half = model(PULSE)
    half.peek(as_seen(closed(9), NOW_S, 9))
    found = {f.metric for f in figures(half.snapshot(), MessageCounts())}
    assert not {metrics.ROUND_DURATION, metrics.CONTRIBUTIONS} & found
    assert metrics.FRAGMENT_VERSION in found


def test_names_out_of_the_log_cannot_become_series_without_end() -> None:
    many = [replace(PULSE, learner=f"l{n}") for n in range(MOST_LEARNERS + 50)]
    assert len(values(reported(*many), metrics.TOKENS)) == MOST_LEARNERS


def test_the_interval_between_commits_follows_commits_and_before_them_the_longest_step() -> None:
    assert value(metrics.ROUND_INTERVAL) is None
    assert value(metrics.ROUND_INTERVAL, PULSE) == CONFIG.sync.h_steps * PULSE.step_time_s
    times = [NOW_S - 50 + 10 * n for n in range(5)]
    read = RunModel(run_record("r", CUT), CONFIG, lambda: NOW_S)
    for version, at_s in enumerate(times, 1):
        read.take(as_seen(closed(version, closed_ns=ns(at_s)), at_s, version))
    assert values(figures(read.snapshot(), MessageCounts()), metrics.ROUND_INTERVAL) == {
        ("r",): 10.0
    }


def test_a_checkpoint_is_due_no_more_often_than_rounds_come() -> None:
    found = reported(PULSE, closed(), later_s=2.0)
    assert values(found, metrics.CHECKPOINT_INTERVAL) == {("r",): CONFIG.checkpoint.every_s}
    assert values(found, metrics.CHECKPOINT_BEHIND) == {("r",): 2}
    assert values(found, metrics.CHECKPOINT_BEHIND_TIME) == {("r",): 2}
    slow = replace(PULSE, step_time_s=500.0)
    assert value(metrics.CHECKPOINT_INTERVAL, slow) == CONFIG.sync.h_steps * 500.0


def test_learners_that_diverge_and_texts_that_are_read_are_counted() -> None:
    sick = replace(PULSE, learner="b", loss=math.nan)
    found = reported(PULSE, sick, judged(), judged(evaluator="f", text_digest=8))
    assert values(found, metrics.LEARNER_DIVERGED) == {("r", "a"): 0, ("r", "b"): 1}
    assert values(found, metrics.HELD_OUT_TEXTS) == {("r",): 2}


def test_held_out_loss_is_reported_with_what_it_is_judged_by() -> None:
    losses = (9.0, 2.0, 3.0, 2.5, 4.0)
    read = [judged(loss=loss, versions=(n,), evaluated_ns=n) for n, loss in enumerate(losses, 1)]
    new_text = replace(read[0], versions=(9,), text_digest=8, loss=7.0)
    for evaluations, expected in ((read, (4.0, 2.0, 2.5)), ([*read, new_text], (7.0, 7.0, 7.0))):
        found = reported(PULSE, *evaluations)
        three = (metrics.HELD_OUT_LOSS, metrics.HELD_OUT_BEST, metrics.HELD_OUT_RECENT)
        assert [values(found, m) for m in three] == [{("r", "e"): loss} for loss in expected]


def test_before_there_is_a_run_only_the_broker_is_reported() -> None:
    assert flat(figures(None, MessageCounts(), servers=[Server("n1")])) == {
        "skerry.broker.up{server=n1}": 0
    }


def families(found: list[Figure]) -> dict[str, Any]:
    text, kind = exposition(found)
    assert kind.startswith("text/plain")
    return {f.name: f for f in text_string_to_metric_families(text.decode())}


def test_a_scrape_reads_back_as_the_table_says(everything: list[Figure]) -> None:
    found = families(everything)
    for metric in of("health-monitor"):
        family = found[prometheus_name(metric).removesuffix("_total")]
        assert family.documentation == metric.description
        assert family.type == metric.kind.value
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.attributes)


def test_a_round_leads_to_its_trace(everything: list[Figure]) -> None:
    text, kind = exposition(everything, OPEN_METRICS)
    assert kind.startswith("application/openmetrics-text")
    found = {f.name: f for f in open_metrics_families(text.decode())}
    samples = found["skerry_round_duration_seconds"].samples
    assert {s.exemplar.labels["trace_id"] for s in samples if s.exemplar} == {TRACE}


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (['x"} 1\nskerry_run_step{run="r"} 666\\'], 'x"} 1\nskerry_run_step{run="r"} 666\\'),
        (["x" * 500 + "0", "x" * 500 + "1"], "x" * 128),
    ],
    ids=["hostile", "long"],
)
def test_a_hostile_name_is_one_bounded_label_and_nothing_more(names: list[str], label: str) -> None:
    found = families(reported(*(replace(PULSE, learner=name) for name in names)))
    assert [s.labels["learner"] for s in found["skerry_step_time_seconds"].samples] == [label]
    assert [s.value for s in found["skerry_run_step"].samples] == [40]


def test_buckets_hold_their_upper_bound_and_add_up() -> None:
    spread = Spread(metrics.STALENESS, ("r",))
    for behind in (0, 0, 1, 99):
        spread.add(behind)
    (family,) = families([spread]).values()
    found = {(s.name[-6:], s.labels.get("le")): s.value for s in family.samples}
    assert [found["bucket", le] for le in ("0.0", "1.0", "16.0", "+Inf")] == [2, 3, 3, 4]
    assert (found["_count", None], found["ss_sum", None]) == (4, 100)
