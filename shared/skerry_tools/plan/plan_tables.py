"""The figures of a plan, each with its unit and convention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from skerry_tools.plan import measured
from skerry_tools.plan.baselines import GB, methods
from skerry_tools.plan.figures import (
    Figure,
    FigureKind,
    FigureTable,
    LineChart,
    Row,
    figures,
    several,
    shown,
)
from skerry_tools.plan.plan import RunPlan
from skerry_tools.plan.traffic import Deployment, PlannedSite, SiteRound

BANDWIDTHS = tuple(10 ** (7 + power / 8) for power in range(41))
"""From 10 Mbit/s to 1 Tbit/s."""
SETTINGS = {
    "H": ("h_steps", "steps between two rounds of a fragment"),
    "P": ("fragments", "fragments"),
    "tau": ("overlap_steps", "steps that a round is meant to take"),
    "K": ("quorum", "contributions after which a round may close"),
    "grace": ("grace_gamma", "share of a round's room for grace"),
    "shards": ("shards", "syncers that share the fragments"),
}


def plan_tables(plan: RunPlan, far: set[str]) -> list[FigureTable]:
    """Return every table; ``far`` are the models that are extrapolated: links, cpu, tokens."""
    at, run = plan.at, plan.question.run

    def kind(*bases: str) -> FigureKind:
        return FigureKind.DERIVED if far.isdisjoint(bases) else FigureKind.EXTRAPOLATED

    links, cpu, tokens = kind("links"), kind("cpu"), kind("links", "tokens")
    rounds = at.site_rounds
    sites = {name: figures(_site(at, site, rounds[name]), links) for name, site in at.sites.items()}
    hub = {**figures(_hub_rates(at), links), **figures(_hub_times(at), cpu)}
    notes = [f"{way.name}: {way.convention}" for way in plan.methods]
    until, copies = shown(plan.tokens, "token"), several(run.log.replicas, "replica")
    of_sites = "Sites: bandwidth for full hiding, rounds, memory"
    return [
        FigureTable("compared", f"Until {until} are trained on", _compared(plan, tokens), notes),
        FigureTable("settings", f"Settings (mode {run.mode})", _settings(plan)),
        FigureTable("rounds", "Rounds", figures(_rounds(at), links)),
        FigureTable("links", of_sites, sites, (), join_alike=True),
        FigureTable("hub", "Hub: broker and syncers", hub),
        FigureTable("memory", "Memory", figures(_memory(at))),
        FigureTable("disk", f"Disk ({copies})", figures(_disk(plan))),
    ]


def _settings(plan: RunPlan) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for name, (key, words) in SETTINGS.items():
        chosen = f"sync.{key}" in plan.chosen
        kind = FigureKind.DERIVED if chosen else FigureKind.INPUT
        how = f"{words}; sync.{key}{', which was open: chosen here' if chosen else ''}"
        found[name] = Figure(getattr(plan.at.load.sync, key), "1", how, kind)
    words = "those that are synchronised"
    return found | {"parameters": Figure(plan.at.load.parameters, "param", words, FigureKind.INPUT)}


def _rounds(at: Deployment) -> Iterator[Row]:
    load, raw = at.load, "measured on Gaussian data, headers included; raw"
    for way, scheme in (("up", load.sync.contribution_scheme), ("down", load.sync.global_scheme)):
        words = f"{scheme}: {raw} {measured.RAW_BITS[scheme]:.2f}"
        yield f"{way}_bits_per_parameter", measured.WIRE_BITS[scheme], "bit", words
    in_effect, every_s = load.sync.h_steps / at.on_schedule_share, at.period_s / load.sync.fragments
    room = load.room_steps if load.sync.overlap_steps else None
    yield "fragment", load.fragment, "param", "the largest of P"
    yield "contribution", load.fragment * load.up_bits, "bit", "one learner's, one round"
    yield "global_fragment", load.fragment * load.down_bits, "bit", "for each learner"
    yield "rounds_every", every_s, "s", "H t / P, t of the K-th fastest learner"
    yield "fragment_returns_after", at.period_s, "s", "H t"
    yield "H_in_effect", in_effect, "step", "longer than H where a link is too slow"
    yield "room", room, "step", "a round may last without delaying others; none: learners stop"
    yield "due_at_the_same_step", at.due_together, "1", "fragments; ceil(P / H)"


def _site(at: Deployment, site: PlannedSite, one: SiteRound) -> Iterator[Row]:
    yield "step", site.step_s, "s", "of each of its learners"
    throughput = "all fragments pass once in H steps: m b N / (H t)"
    deadlines = "a round ends in its room; none: no rate is enough"
    factor = one.factor if at.load.sync.overlap_steps and not site.local else 0.0
    ways = (("up", site.up_bits_s, one.up_bits_s), ("down", site.down_bits_s, one.down_bits_s))
    for way, has, average in ways:
        deadline = None if factor is None else has * factor
        needed = None if deadline is None else max(average, deadline)
        yield f"{way}_throughput", average, "bit/s", throughput
        yield f"{way}_deadline", deadline, "bit/s", deadlines
        yield f"{way}_needed", needed, "bit/s", "the larger, for full hiding"
    yield "round", one.round_s, "s", "stages one after another"
    yield "slack", one.slack_steps, "step", "the room less the round"
    yield "memory_per_chip", at.load.learner_bytes / site.table.chips, "B", "the learner's, evenly"
    yield "tau_fits", one.tau, "1", "least tau with room for it; none: none below H"


def _hub_rates(at: Deployment) -> Iterator[Row]:
    load, hub, each = at.load, at.hub_round, at.load.parameters / at.period_s / at.load.sync.shards
    reads, writes = at.learners * load.up_bits * each, 8 * load.state_bytes * each
    yield "ingress", hub.ingress_bits_s, "bit/s", "all contributions, on average"
    yield "egress", hub.egress_bits_s, "bit/s", "all global fragments, on average"
    yield "syncer_reads", reads, "bit/s", "contributions of a shard, from the broker"
    yield "syncer_writes", writes, "bit/s", "committed state of a shard, to the broker"
    yield "broker_stores", hub.broker_bytes_s, "B/s", "contributions and state, one replica"


def _hub_times(at: Deployment) -> Iterator[Row]:
    load, hub = at.load, at.hub_round
    merge_s = measured.merge_s(load.sync.contribution_scheme, load.fragment, at.learners)
    encode_s = measured.encode_s(load.sync.global_scheme, load.fragment, at.hub.cores)
    yield "syncer_busy", hub.busy_share, "share", "of one syncer's time, per shard"
    yield "merge", merge_s, "s", f"one fragment of {at.learners} contributions"
    yield "encode", encode_s, "s", f"the new fragment in {load.sync.global_scheme}"
    yield "syncer_in_a_round", hub.syncer_s, "s", "decode, merge, encode, write"


def _memory(at: Deployment) -> Iterator[Row]:
    load, whole, vectors = at.load, 4 * at.load.parameters, at.load.outer_vectors
    held = "f32 parameters, anchors, 2 AdamW moments, 2 vectors of each fragment in flight"
    syncer = (2 + vectors) * whole / load.sync.shards
    syncer += at.learners * load.fragment * load.up_bits / 8
    cut = whole + 4 * (1 + vectors) * load.fragment
    yield "learner", load.learner_bytes, "B", f"{held}; no activations"
    yield "syncer_of_a_shard", syncer, "B", "f32 master, outer state, result, contributions"
    yield "checkpointer", cut, "B", "f32 parameters and the fragment in hand"
    yield "evaluator", 2 * whole, "B", "f32 parameters and their copy on the device"
    yield "health_monitor", None, "B", "holds no parameters: a few hundred bytes for each round"


def _disk(plan: RunPlan) -> Iterator[Row]:
    at, load, log = plan.at, plan.at.load, plan.question.run.log
    state = measured.STATE_COPIES * load.state_bytes * load.parameters * log.replicas
    window = log.window_s / at.period_s * load.parameters * load.up_bits / 8 * at.learners
    commits = plan.bills[0].wall_s / at.period_s * load.sync.fragments
    ledger = commits * measured.COMMIT_BYTES * log.replicas
    newest = plan.question.run.checkpoint.keep_newest
    one = 4 * (1 + load.outer_vectors) * load.parameters
    hours = f"all of the last {log.window_s / 3600:g} h (log.window_s)"
    first = "all learners' initial parameters, f32: log.window_bytes must not be less"
    yield "state", state, "B", f"{measured.STATE_COPIES} x what a commit stores"
    yield "contributions", window * log.replicas, "B", hours
    yield "contributions_at_least", at.initial_bytes * log.replicas, "B", first
    yield "ledger", ledger, "B", f"{measured.COMMIT_BYTES} B a commit, {commits:,.0f} commits"
    yield "checkpoints", one * newest, "B", f"the newest {newest}; each {one / GB:,.1f} GB in f32"


def _compared(plan: RunPlan, kind: FigureKind) -> dict[str, dict[str, Figure]]:
    currency, missing = plan.at.plan.currency, "no prices given: price_chip_hour, price_egress_gb"
    rows: dict[str, dict[str, Figure]] = {}
    for index, (way, bill) in enumerate(zip(plan.methods, plan.bills, strict=True)):
        costs = {"chips_cost": bill.chips, "egress_cost": bill.egress, "cost": bill.total}
        listed: list[Row] = [
            ("tokens/s", way.tokens_s, "tokens/s", way.convention),
            ("utilisation", way.utilisation, "share", "time in compute"),
            ("goodput", way.goodput * plan.at.plan.goodput, "share", "plan.goodput, chip_mtbi"),
            ("time", bill.wall_s, "s", "until all tokens are trained on"),
            ("site_sends", way.bits, "bit", "the busiest site, in H steps"),
            ("speed_up_of_this_plan", plan.speed_up(index), "x", "tokens a second, with goodput"),
            *((key, cost, currency, missing * (cost is None)) for key, cost in costs.items()),
        ]
        rows[way.name] = figures(listed, kind)
    return rows


def bandwidth_chart(plan: RunPlan) -> LineChart:
    """Return utilisation against the bandwidth of every site, for the plan and each baseline."""
    series: dict[str, list[tuple[float, float]]] = {}
    for rate in BANDWIDTHS:
        rates = {"up": rate, "down": rate, "derating": 1.0}
        sites = plan.at.sites.items()
        even = {name: replace(one, table=one.table.model_copy(update=rates)) for name, one in sites}
        at = replace(plan.at, sites=even)
        shares = {"this plan: rounds in time": at.on_schedule_share}
        shares |= {way.name: way.utilisation for way in methods(at)[1:]}
        for name, share in shares.items():
            series.setdefault(name, []).append((rate, share))
    title = "Utilisation against bandwidth; learners of this plan never wait"
    across = "bandwidth of every site, each way, bit/s"
    return LineChart("utilisation-against-bandwidth", title, across, series)
