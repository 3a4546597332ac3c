"""A plan as its reader gets it: the verdict first, then figures with their conventions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from skerry_tools.plan import measured, memory
from skerry_tools.plan.answer import Answer, Figure, FigureTable, Kind, Row, figures, several, shown
from skerry_tools.plan.baselines import GB
from skerry_tools.plan.plan import RunPlan
from skerry_tools.plan.traffic import Deployment, PlannedSite

TIMES = 10
"""Figures are extrapolated ten times beyond what Streaming DiLoCo's table was checked on."""
CHECKED_LEARNERS, CHECKED_H = 16, 1000
"""Decoupled DiLoCo has M up to 16; H up to 500 is published in DiLoCo."""
MOST_LEARNERS = 8
"""Above 8 learners the score of Decoupled DiLoCo (arXiv 2604.21428) fell."""
SETTINGS = ("h_steps", "fragments", "overlap_steps", "quorum", "grace_gamma", "shards")


def answer(plan: RunPlan) -> Answer:
    """Return a plan as text and JSON."""
    caveats, asked = list(_caveats(plan)), plan.question.tables
    facts = {name: getattr(plan, name) for name in ("feasible", "fixes", "chosen", "way_out")}
    facts["settings"] = {name: getattr(plan.at.load.sync, name) for name in SETTINGS}
    return Answer(
        first=verdict(plan),
        tables=list(_tables(plan, {basis for basis, _ in caveats})),
        mind=[*(f"extrapolated: {why}" for _, why in caveats), *_notes(plan)],
        source=asked.source,
        status=asked.status,
        facts=facts,
    )


def verdict(plan: RunPlan) -> str:
    """Return the first line: feasible or not, what binds and its fix, what was not judged."""
    at, load, sync = plan.at, plan.at.load, plan.at.load.sync
    binding = plan.judged[0] if plan.judged else None
    if binding is not None and not plan.feasible:
        fixed = ", or ".join(plan.fixes[:3]) or "no single setting is enough"
        others = sum(not c.holds for c in plan.judged[1:])
        more = f"; {others} more below" if others else ""
        way = ", ".join(f"{name}={n}" for name, n in plan.way_out.items())
        out = f". All holds with {way}" if way else ""
        return f"Not feasible: {binding.text}: {fixed}{more}{out}."
    settings = (
        f"{shown(load.parameters, 'param')} on {several(at.learners, 'learner')} at "
        f"{several(len(at.sites), 'site')} with H={sync.h_steps} P={sync.fragments} "
        f"tau={sync.overlap_steps} K={sync.quorum}, "
        f"{sync.contribution_scheme} up and {sync.global_scheme} down"
    )
    how = "all communication hidden" if sync.overlap_steps else "learners stop for rounds"
    speed, took_s = (
        shown(plan.methods[0].tokens_s, "tokens/s"),
        shown(plan.methods[0].wall_s(plan.tokens), "s"),
    )
    if not plan.question.bare_tokens:
        how += f", {speed}, {shown(plan.tokens, 'token')} in {took_s}"
    tight = f"; tightest: {binding.text}" if binding else ""
    needed: list[str] = []
    chips = [site.table.chips for site in at.sites.values() if site.table.memory is None]
    if chips:
        each = shown(memory.learner_bytes(load) / min(chips), "B")
        needed.append(f"{each} of memory on a chip (sites.<name>.memory)")
    if at.hub.write is None:
        stored = shown(at.hub_round.broker_bytes_s, "B/s")
        needed.append(f"{stored} into the broker (hub.write)")
    rest = f" Not judged: {' and '.join(needed)}." if needed else ""
    fast = shown(plan.speed_up(1), "x")
    return f"Feasible: {settings}: {how}, {fast} synchronous data-parallel{tight}.{rest}"


def _caveats(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield where a plan leaves what its models were checked on: what rests on it, and why."""
    at, load = plan.at, plan.at.load

    def far(value: float, least: float, most: float) -> bool:
        return not least / TIMES <= value <= most * TIMES

    if far(load.parameters, 1e9, 100e9):
        yield "links", f"{shown(load.parameters, 'param')}; the models were checked on 1B-100B"
    if at.learners > CHECKED_LEARNERS:
        yield "links", f"{at.learners} learners; at most {CHECKED_LEARNERS} are published"
    if load.sync.h_steps > CHECKED_H:
        yield "links", f"H = {load.sync.h_steps}; at most 500 is published"
    for site in at.sites.values():
        if far(site.step_s, 0.1, 4.9):
            steps = f"steps of {shown(site.step_s, 's')} at {site.name}"
            yield "links", f"{steps}; checked on 0.1-4.9 s"
        if far(site.up_bits_s, 0.1e9, 1e12) or far(site.down_bits_s, 0.1e9, 1e12):
            yield "links", f"the link of {site.name}; checked on 0.1-1000 Gbit/s"
    yield from (("cpu", why) for why in _unmeasured(at))
    if plan.question.bare_tokens:
        tokens = next(iter(at.sites.values())).step_tokens
        why = "tokens a second, time and cost; the tokens of a learner's step are not given"
        yield "tokens", f"{why} (--step-tokens), and {tokens:g} were taken"


def _unmeasured(at: Deployment) -> Iterator[str]:
    if at.learners not in measured.MERGE_CHECKED:
        yield f"merging {at.learners} contributions was not measured, 4 and 8 were"
    up, down = at.load.sync.contribution_scheme, at.load.sync.global_scheme
    if up not in measured.MERGE_EACH or down not in measured.ENCODE_B_S:
        yield "the syncer's time; it was measured for int4, int8 and bf16"
    if max(at.hub.cores, *(site.table.cores for site in at.sites.values())) > 1:
        yield "encoding on several cores; one core was measured"


def _notes(plan: RunPlan) -> Iterator[str]:
    """Yield what no constraint says and a reader should know."""
    at, stored = plan.at, plan.at.hub_round.broker_bytes_s
    meshes = ", ".join(site.name for site in at.sites.values() if site.table.chips > 1)
    if meshes:
        one = "a learner is one process, on the chips of one machine"
        yield f"{one}: learners over several machines, at {meshes}, cannot run yet"
    if at.hub.write is None and stored > measured.BROKER_WRITE_B_S / 2:
        here = f"one broker on two shared cores took {shown(measured.BROKER_WRITE_B_S, 'B/s')} here"
        need = f"the broker must store {shown(stored, 'B/s')}"
        yield f"{need}: give hub.write to have that judged ({here})"
    each_s = measured.COMMIT_CPU_S[at.load.outer_vectors > 0]
    cores = each_s * at.load.parameters / at.period_s
    if cores > 1:
        took = f"whole commits took {each_s * 1e9:.0f} CPU s for 1e9 parameters here: {cores:.1f}"
        yield f"{took} cores of the syncers all the time; judged are decode, merge and encode alone"
    initial = memory.initial_bytes(at)
    if at.window_bytes is None and initial > plan.question.run.log.window_bytes:
        twice = f"the broker reserves {shown(2 * initial, 'B')} for contributions"
        least = f"log.window_bytes={initial:.0f} at least, if that is too much"
        yield f"{twice} (twice what all learners send at the beginning): {least}"
    if at.learners > MOST_LEARNERS:
        scores = "the paper's average score was 54.4, 55.0, 55.4, 53.4 for M = 2, 4, 8, 16"
        join = f"join learners of a site until {MOST_LEARNERS} are left"
        yield f"{at.learners} learners: {scores}; {join}"
    if at.learners == 1:
        yield "1 learner: there is nothing to synchronise (mode=single)"


def _tables(plan: RunPlan, far: set[str]) -> Iterator[FigureTable]:
    """Yield every table; ``far`` are the models that are extrapolated: links, cpu, tokens."""
    at, run = plan.at, plan.question.run

    def kind(*bases: str) -> Kind:
        return "derived" if far.isdisjoint(bases) else "extrapolated"

    judged: dict[str, Mapping[str, Figure]] = {}
    for item in plan.judged:
        rows = {"of it": (item.ratio, "share", item.why), "needs": (item.need, item.unit, item.why)}
        judged[item.what.removeprefix("site ")] = figures(
            rows | {"has": (item.has, item.unit, item.why)}
        )
    yield FigureTable("judged", "Judged: need over what there is", judged)
    until = f"Until {shown(plan.tokens, 'token')} are trained on"
    notes = [f"  {way.name}: {way.convention}" for way in plan.methods]
    yield FigureTable("compared", until, _compared(plan, kind("links", "tokens")), notes)
    yield FigureTable("rounds", "Rounds", figures(_rounds(at), kind("links")))
    sites = {name: figures(_site(at, site), kind("links")) for name, site in at.sites.items()}
    yield FigureTable("links", "Sites: bandwidth for full hiding, rounds, memory", sites)
    hub, stored = at.hub_round, "contributions and state, one replica"
    rates: dict[str, Row] = {
        "ingress": (hub.ingress_bits_s, "bit/s", "all contributions, on average"),
        "egress": (hub.egress_bits_s, "bit/s", "all global fragments, on average"),
        "broker_stores": (hub.broker_bytes_s, "B/s", stored),
    }
    times: dict[str, Row] = {
        "syncer_busy": (hub.busy_share, "share", "of one syncer's time, per shard"),
        "syncer_in_a_round": (hub.syncer_s, "s", "decode, merge, encode, write"),
    }
    both = figures(rates, kind("links")) | figures(times, kind("cpu"))
    yield FigureTable("hub", "Hub: broker and syncers", both)
    yield FigureTable("memory", "Memory", figures(_memory(at)))
    disk = f"Disk ({several(run.log.replicas, 'replica')})"
    yield FigureTable("disk", disk, figures(_disk(plan)))


def _compared(plan: RunPlan, kind: Kind) -> dict[str, Mapping[str, Figure]]:
    currency, missing = plan.at.plan.currency, "no prices given: price_chip_hour, price_egress_gb"
    rows: dict[str, Mapping[str, Figure]] = {}
    for index, way in enumerate(plan.methods):
        chips = way.chips_cost(plan.at, plan.tokens)
        egress = way.egress_cost(plan.at, plan.tokens)
        total = None if chips is None else chips + (egress or 0.0)
        listed: dict[str, Row] = {
            "tokens/s": (way.tokens_s, "tokens/s", way.convention),
            "utilisation": (way.utilisation, "share", "time in compute"),
            "goodput": (way.goodput, "share", "plan.goodput, chip_mtbi"),
            "time": (way.wall_s(plan.tokens), "s", "until all tokens are trained on"),
            "site_sends": (max(way.sent.values()), "bit", "the busiest site, in H steps"),
            "speed_up_of_this_plan": (plan.speed_up(index), "x", "tokens a second, with goodput"),
        }
        for name, cost in (("chips_cost", chips), ("egress_cost", egress), ("cost", total)):
            listed[name] = (cost, currency, missing if cost is None else "")
        rows[way.name] = figures(listed, kind)
    return rows


def _rounds(at: Deployment) -> dict[str, Row]:
    load, up, down = at.load, at.load.sync.contribution_scheme, at.load.sync.global_scheme
    raw, holds = "measured on Gaussian data, headers included; raw", "none: learners stop"
    room = load.room_steps if load.sync.overlap_steps else None
    up_words = f"{up}: {raw} {measured.RAW_BITS[up]:.2f}"
    down_words = f"{down}: {raw} {measured.RAW_BITS[down]:.2f}"
    return {
        "parameters": (load.parameters, "param", "those that are synchronised"),
        "shards": (load.sync.shards, "1", "syncers that share the fragments"),
        "up_bits_per_parameter": (load.up_bits, "bit", up_words),
        "down_bits_per_parameter": (load.down_bits, "bit", down_words),
        "fragment": (load.fragment, "param", "the largest of P"),
        "contribution": (load.fragment * load.up_bits, "bit", "one learner's, one round"),
        "global_fragment": (load.fragment * load.down_bits, "bit", "for each learner"),
        "fragment_returns_after": (at.period_s, "s", "H t, t of the K-th fastest learner"),
        "room": (room, "step", f"a round may last without delaying others; {holds}"),
    }


def _site(at: Deployment, site: PlannedSite) -> dict[str, Row]:
    one, waits = at.site_rounds[site.name], at.load.sync.overlap_steps
    factor = one.factor if waits and not site.local else 0.0
    needed = "throughput or deadline bound, the larger; none: no rate is enough"
    ways = (("up", site.up_bits_s, one.up_bits_s), ("down", site.down_bits_s, one.down_bits_s))
    rows: dict[str, Row] = {"step": (site.step_s, "s", "of each of its learners")}
    for way, has, average in ways:
        rate = None if factor is None else max(average, has * factor)
        rows[f"{way}_average"] = (average, "bit/s", "all fragments pass once in H steps")
        rows[f"{way}_needed"] = (rate, "bit/s", needed)
    held = memory.learner_bytes(at.load) / site.table.chips
    return rows | {
        "round": (one.round_s, "s", "stages one after another"),
        "slack": (one.slack_steps, "step", "the room less the round"),
        "memory_per_chip": (held, "B", "the learner's, evenly"),
    }


def _memory(at: Deployment) -> dict[str, Row]:
    load, whole = at.load, 4 * at.load.parameters
    held = "f32 parameters, anchors, 2 AdamW moments, 2 vectors of each fragment in flight"
    cut = whole + 4 * (1 + load.outer_vectors) * load.fragment
    of_shard = "f32 master, outer state, result, contributions"
    return {
        "learner": (memory.learner_bytes(load), "B", f"{held}; no activations"),
        "syncer_of_a_shard": (memory.syncer_bytes(at), "B", of_shard),
        "checkpointer": (cut, "B", "f32 parameters and the fragment in hand"),
        "evaluator": (2 * whole, "B", "f32 parameters and their copy on the device"),
    }


def _disk(plan: RunPlan) -> dict[str, Row]:
    at, load, log = plan.at, plan.at.load, plan.question.run.log
    state = measured.STATE_COPIES * load.state_bytes * load.parameters * log.replicas
    window, initial = memory.window_bytes(at, log.window_s), memory.initial_bytes(at)
    commits = plan.methods[0].wall_s(plan.tokens) / at.period_s * load.sync.fragments
    ledger = commits * measured.COMMIT_BYTES * log.replicas
    newest, one = plan.question.run.checkpoint.keep_newest, memory.checkpoint_bytes(load)
    hours = f"all of the last {log.window_s / 3600:g} h (log.window_s)"
    first = "all learners' initial parameters, f32: log.window_bytes must not be less"
    each = f"the newest {newest}; each {one / GB:,.1f} GB in f32"
    return {
        "state": (state, "B", f"{measured.STATE_COPIES} x what a commit stores"),
        "contributions": (window * log.replicas, "B", hours),
        "contributions_at_least": (initial * log.replicas, "B", first),
        "ledger": (ledger, "B", f"{measured.COMMIT_BYTES} B a commit, {commits:,.0f} commits"),
        "checkpoints": (one * newest, "B", each),
    }
