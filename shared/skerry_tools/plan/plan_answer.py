"""Render a plan as text, tables and JSON: the verdict first, then figures with conventions."""

from __future__ import annotations

from collections.abc import Iterator

from skerry.algorithm.schemes import AUTO, scheme_of
from skerry.models.tensors import active_parameters
from skerry.protocol.parts import INITIAL_BYTES
from skerry.store.retention import after_a_month
from skerry_tools.plan import measured, memory
from skerry_tools.plan.answer import Answer, Figure, Figures, FigureTable, Kind, shown
from skerry_tools.plan.plan import RunPlan
from skerry_tools.plan.question import CHOICES
from skerry_tools.plan.traffic import Deployment, PlannedSite
from skerry_tools.plan.trained import from_scratch

TIMES = 10
"""Figures are extrapolated ten times beyond what Streaming DiLoCo's table was checked on."""
CHECKED_LEARNERS, CHECKED_H = 16, 1000
"""Decoupled DiLoCo has M up to 16; H up to 500 is published in DiLoCo."""
MOST_LEARNERS = 8
"""Above 8 learners the score of Decoupled DiLoCo (arXiv 2604.21428) fell."""
MACHINE = 8
"""Chips of one machine, as most have it."""
SETTINGS = ("h_steps", "fragments", "overlap_steps", "quorum", "grace_gamma", "shards")


def answer(plan: RunPlan) -> Answer:
    far, asked = list(_caveats(plan)), plan.question.tables
    facts = {name: getattr(plan, name) for name in ("feasible", "fixes", "chosen", "way_out")}
    facts["settings"] = {name: getattr(plan.at.load.sync, name) for name in SETTINGS}
    return Answer(
        first=verdict(plan),
        tables=list(_tables(plan, "extrapolated" if far else "derived")),
        mind=[*(f"extrapolated: {why}" for why in far), *_notes(plan)],
        source=asked.source,
        status=asked.status,
        facts=facts,
    )


def verdict(plan: RunPlan) -> str:
    """Return the first line: how a feasible plan compares, or what binds another and its fix."""
    at, sync, binding = plan.at, plan.at.load.sync, plan.judged[0]
    if not plan.feasible:
        fixed = ", or ".join(plan.fixes[:3]) or "no single setting is enough"
        others = sum(not c.holds for c in plan.judged[1:])
        more = f"; {others} more below" if others else ""
        way = ", ".join(f"{name}={n}" for name, n in plan.way_out.items())
        out = f". All holds with {way}" if way else ""
        return f"Not feasible: {binding.text}: {fixed}{more}{out}."
    settings = (
        f"{_sizes(at)} on {shown(at.learners, 'learner')} at "
        f"{shown(len(at.sites), 'site')} with H={sync.h_steps} P={sync.fragments} "
        f"tau={sync.overlap_steps} K={sync.quorum}, "
        f"{sync.contribution_scheme} up and {at.load.down_scheme} down"
    )
    mine, ring = plan.methods[:2]
    how = "all communication hidden" if sync.overlap_steps else "learners stop for rounds"
    kept = f"goodput {100 * mine.goodput:.5g} %"
    how += f", {'without failures' if at.tables.failures.never else kept}"
    if not plan.question.bare_tokens:
        took, tokens = shown(mine.wall_s(plan.tokens), "s"), shown(plan.tokens, "token")
        how += f", {shown(mine.tokens_s * mine.goodput, 'tokens/s')}, {tokens} in {took}"
    in_step, over_links = (shown(plan.speed_up(index), "x") for index in (2, 1))
    how += f"; {in_step} the same chips in one region, {over_links} data-parallel over these links"
    how += f" (computing {shown(ring.utilisation, 'share')} of the time)"
    far = ", extrapolated" if next(_caveats(plan), None) else ""
    return f"Feasible{far}: {settings}: {how}; tightest: {binding.text}."


def _sizes(at: Deployment) -> str:
    """Say how large the model is: what is trained of it, and what a token sees of it."""
    load = at.load
    said = shown(load.parameters, "param")
    if load.frozen:
        said += f" trained of {shown(load.parameters + load.frozen, 'param')}"
    if load.arch and load.arch.experts:
        said += f" ({shown(active_parameters(load.arch), 'param')} active)"
    return said


def _caveats(plan: RunPlan) -> Iterator[str]:
    """Yield where a plan leaves the range that its models were checked on."""
    at, load = plan.at, plan.at.load
    checked = [("the model", load.parameters, 1e9 / TIMES, 100e9 * TIMES, "param")]
    for name, site in at.sites.items():
        links = ((f"the link of {name}", rate) for rate in site.rates)
        checked += [(what, rate, 0.1e9 / TIMES, 1e12 * TIMES, "bit/s") for what, rate in links]
        checked.append((f"a step at {name}", site.step_s, 0.1 / TIMES, 4.9 * TIMES, "s"))
    checked.append(("M", at.learners, 1, CHECKED_LEARNERS, "1"))
    checked.append(("H", load.sync.h_steps, 1, CHECKED_H, "1"))
    for what, value, least, most, unit in checked:
        if not least <= value <= most:
            held = f"{shown(least, unit)} to {shown(most, unit)}"
            yield f"{what} is {shown(value, unit)}; the models hold for {held}"
    if at.learners not in measured.MERGE_CHECKED:
        yield f"merging {at.learners} contributions was not measured, 4 and 8 were"
    up, down = load.sync.contribution_scheme, load.down_scheme
    if up not in at.speeds.merge_each or down not in {AUTO, *at.speeds.encode}:
        yield "the syncer's time with schemes that were not measured"
    if max(at.hub.cores, *(site.table.cores for site in at.sites.values())) > 1:
        yield "encoding on several cores; one core was measured"
    if plan.question.bare_tokens:
        tokens = next(iter(at.sites.values())).step_tokens
        why = "tokens a second, time and cost; the tokens of a learner's step are not given"
        yield f"{why} (--step-tokens), and {tokens:g} were taken"


def _notes(plan: RunPlan) -> Iterator[str]:
    """Yield what no constraint says and a reader should know."""
    at, sites = plan.at, plan.at.sites.values()
    if meshes := ", ".join(site.name for site in sites if site.table.chips > MACHINE):
        one = f"learners of more than {MACHINE} chips, at {meshes}, are a process on each machine"
        yield f"{one} (learner.processes), which each save their part of the moments"
    if at.load.frozen:
        yield "only adapters are trained and sent; each site has a copy of what is frozen"
    elif at.load.arch and at.load.arch.experts:
        yield "rounds move all parameters, a step computes with the active ones only"
    yield from _taken(at)
    if at.learners > 1:
        yield from _loss_notes(at)
    if at.learners > MOST_LEARNERS:
        scores = "the paper's average score was 54.4, 55.0, 55.4, 53.4 for M = 2, 4, 8, 16"
        join = f"join learners of a site until {MOST_LEARNERS} are left"
        yield f"{at.learners} learners: {scores}; {join}"
    if at.learners == 1:
        yield "1 learner: there is nothing to synchronise (mode=single)"


def _loss_notes(at: Deployment) -> Iterator[str]:
    """Yield what a reader should know about the loss beside its table."""
    by_h = measured.LOSS_BY_H.get(at.run.train.inner, {})
    if not from_scratch(at.run):
        yield "loss is not judged: its cost in M and H was measured for training from scratch only"
    elif near := max((h for h in by_h if h <= at.load.sync.h_steps), default=None):
        yield f"H = {near} ended {by_h[near]} % above H = 8 with small models (docs/quality.md)"


def _loss(at: Deployment) -> Figures:
    """Return what M costs in loss, of models that are trained from scratch."""
    inner, size, m = at.run.train.inner, at.load.parameters, measured.measured_with(at.learners)
    if at.learners == 1 or not from_scratch(at.run):
        return {}
    least, most = (shown(edge, "param") for edge in measured.LAW_SIZES)
    law = f"M = {m}, AdamW, H = 30, {least} to {most} (arXiv 2503.09799)"
    rows = {"published law": Figure(measured.gap_by_law(at.learners, size) / 100, "share", law)}
    if inner in measured.GAPS:
        gap, near = measured.gap_by_own_fit(inner, at.learners, size)
        beyond = ", our largest" * (size > near) + ", our smallest" * (size < near)
        held = f"M = {m}, {inner}, H = 24, of {shown(near, 'param')}{beyond} (docs/quality.md)"
        rows["own fit"] = Figure(gap / 100, "share", held)
    return rows


def _taken(at: Deployment) -> Iterator[str]:
    """Yield the values assumed for what is not given, and what is not judged."""
    if at.speeds is not measured.DEFAULT:
        speeds = at.speeds
        both = (("encode", speeds.encode), ("decode", speeds.decode))
        each = [f"{what} {s} {shown(b_s, 'B/s')}" for what, one in both for s, b_s in one.items()]
        wrote = f"publish {shown(at.hub.write, 'B/s')}"
        yield f"measured on this machine, f32 on one core: {', '.join(each)}; {wrote}"
    elif "write" not in at.hub.model_fields_set:
        took = shown(measured.BROKER_WRITE_B_S, "B/s")
        yield f"hub.write is not given: one broker on two shared cores stored {took} here"
    tables = [site.table for site in at.sites.values()]
    if taken := [one.memory for one in tables if "memory" not in one.model_fields_set]:
        has = shown(taken[0], "B")
        yield f"sites.<name>.memory is not given: chips of {has} were taken"
    if at.hub.disk is None:
        disk = shown(memory.state_disk_bytes(at) + memory.contributions_bytes(at), "B")
        yield f"not judged: {disk} of disk for each replica of the log (hub.disk)"
    if at.window_bytes > at.run.log.window_bytes:
        kept = f"the broker reserves {shown(at.window_bytes, 'B')} for contributions"
        least = f"{INITIAL_BYTES * at.load.parameters:.0f} at least, with more snapshots"
        so = "so that a syncer can merge them again; if that is too much"
        yield f"{kept}, {so}: log.window_bytes={least}"


def _tables(plan: RunPlan, kind: Kind) -> Iterator[FigureTable]:
    at = plan.at
    judged = {
        item.what.removeprefix("site "): {
            "of it": Figure(item.ratio, "share", item.why),
            "needs": Figure(item.need, item.unit, item.why),
            "has": Figure(item.has, item.unit, item.why),
        }
        for item in plan.judged
    }
    yield FigureTable("judged", "Judged: need over what there is", judged)
    until = f"Until {shown(plan.tokens, 'token')} are trained on"
    notes = [f"  {way.name}: {way.convention}" for way in plan.methods]
    yield FigureTable("compared", until, _compared(plan), kind, notes)
    if loss := _loss(at):
        title = "Loss above data-parallel, each at its best rates: not judged"
        yield FigureTable("loss", title, loss, "extrapolated")
    if plan.choices:
        title = "Choices that hold with a tenth to spare: less of one is more of another"
        choices = {
            f"choice {number}": {name: Figure(getattr(one, name), "1") for name in CHOICES}
            | {"link": Figure(one.link_bits_s, "bit/s", "of a site, the busier direction")}
            for number, one in enumerate(plan.choices, 1)
        }
        yield FigureTable("choices", title, choices, kind)
    yield FigureTable("rounds", "Rounds", _rounds(at), kind)
    sites = {name: _site(at, site) for name, site in at.sites.items()}
    yield FigureTable("links", "Sites: links, rounds, memory", sites, kind)
    yield FigureTable("hub", "Hub: broker, syncers, disks", _hub(at), kind)


def _compared(plan: RunPlan) -> dict[str, Figures]:
    currency = plan.at.tables.plan.currency
    missing, rows = "no prices given: price_chip_hour, price_egress_gb", dict[str, Figures]()
    for index, way in enumerate(plan.methods):
        sent = plan.tokens / way.cycle_tokens * sum(way.sent.values()) / 8
        costs = way.costs(plan.at, plan.tokens)
        rows[way.name] = {
            "tokens/s": Figure(way.tokens_s, "tokens/s", way.convention),
            "utilisation": Figure(way.utilisation, "share", "time in compute"),
            "goodput": Figure(way.goodput, "share", "[failures], [recovery], [pauses]"),
            "time": Figure(way.wall_s(plan.tokens), "s", "until all tokens are trained on"),
            "busiest_sends": Figure(max(way.sent.values()) / 8, "B", "a site or the hub, H steps"),
            "all_send": Figure(sent, "B", "sites and hub, the whole run"),
            "speed_up_of_this_plan": Figure(plan.speed_up(index), "x", "tokens/s, with goodput"),
        } | {name: Figure(c, currency, missing if c is None else "") for name, c in costs.items()}
    return rows


def _rounds(at: Deployment) -> Figures:
    load, up, down = at.load, at.load.sync.contribution_scheme, at.load.down_scheme
    room = load.room_steps if load.sync.overlap_steps else None
    noise, holds = "measured on Gaussian data", "none: learners stop"
    trained = "measured in training" if down == AUTO else noise
    up_words = f"{up}: {noise}, headers included; raw {measured.RAW_BITS[up]:.2f}"
    down_words = f"{down}: {trained}, headers included; raw {measured.RAW_BITS[down]:.2f}"
    return {
        "parameters": Figure(load.parameters, "param", "those that are trained and synchronised"),
        "all_parameters": Figure(load.parameters + load.frozen, "param", "frozen ones included"),
        "operations": Figure(load.token_flops, "FLOP", "of a token of a training step"),
        "up_bits_per_parameter": Figure(load.up_bits, "bit", up_words),
        "down_bits_per_parameter": Figure(load.down_bits, "bit", down_words),
        "fragment": Figure(load.fragment, "param", "the largest of P"),
        "fragment_returns_after": Figure(at.period_s, "s", "H t, t of the K-th fastest learner"),
        "room": Figure(room, "step", f"a round may last without delaying others; {holds}"),
    }


def _site(at: Deployment, site: PlannedSite) -> Figures:
    one, need = at.site_rounds[site.name], memory.learner_need(at, site)
    average, held = "all fragments pass once in H steps", "on each chip of its mesh"
    slack_steps = at.load.room_steps - one.round_s / at.clock_s
    whole = at.load.catch_up_bits * at.load.parameters
    caught_s = (whole / 8 / at.hub.write) if site.local else whole / at.link(site)[1]
    parts = ("state", "gradients", "activations", "flight")
    return {
        "step": Figure(site.step_s, "s", "of each of its learners"),
        "up_average": Figure(one.up_bits_s, "bit/s", average),
        "down_average": Figure(one.down_bits_s, "bit/s", average),
        "round": Figure(one.round_s, "s", "stages one after another"),
        "slack": Figure(slack_steps, "step", "the room less the round"),
        "catch_up": Figure(caught_s, "s", "at most, to read a keyframe and the deltas since"),
        **{f"{name}_memory": Figure(getattr(need, name), "B", held) for name in parts},
        "memory_per_chip": Figure(need.total, "B", "all of that at once"),
    }


def _hub(at: Deployment) -> Figures:
    """Return what broker and syncers do, and what services and disks hold."""
    hub, load, saving = at.hub_round, at.load, at.run.checkpoint
    fed_back = 8 * load.parameters * scheme_of(load.sync.contribution_scheme).feedback
    hours = f"of the last {at.run.log.window_s / 3600:.3g} h, up to log.window_bytes"
    each = load.snapshot_bytes + measured.RAW_BITS[load.sync.global_scheme] / 8
    count = after_a_month(saving)
    (read, recovery_s), rare = memory.recovery(at), f"{1 / at.snapshots:.3g} versions, on average"
    return {
        "ingress": Figure(hub.ingress_bits_s, "bit/s", "all contributions, on average"),
        "egress": Figure(hub.egress_bits_s, "bit/s", "all global fragments, on average"),
        "broker_stores": Figure(hub.broker_bytes_s, "B/s", "contributions, state; one replica"),
        "broker_stores_at_most": Figure(hub.broker_most_bytes_s, "B/s", f"snapshots: every {rare}"),
        "recovery": Figure(recovery_s, "s", "at most, of a syncer that takes a shard over"),
        "recovery_reads": Figure(read, "B", "a snapshot, global fragments, contributions since"),
        "syncer_cores": Figure(hub.busy_cores, "core", "of each syncer, for whole commits"),
        "syncer_busy": Figure(hub.busy_share, "share", "of its time: decode, merge, encode"),
        "syncer_in_a_round": Figure(hub.syncer_s, "s", "decode, merge, encode, write"),
        "syncer_memory": Figure(memory.syncer_bytes(at), "B", "of a shard, contributions too"),
        "learner_host": Figure(fed_back, "B", "what int2 feeds back, beside devices' memory"),
        "disk_of_state": Figure(memory.state_disk_bytes(at), "B", "one replica, slots included"),
        "disk_of_contributions": Figure(memory.contributions_bytes(at), "B", hours),
        "disk_of_checkpoints": Figure(
            count * each * load.parameters, "B", f"{count} after a month: bf16, f32, outer state"
        ),
    }
