"""A plan as its reader gets it: the verdict first, then figures with their conventions."""

from __future__ import annotations

from collections.abc import Iterator

from skerry.algorithm.schemes import scheme_of
from skerry_tools.plan import measured, memory
from skerry_tools.plan.answer import Answer, Figure, Figures, FigureTable, Kind, several, shown
from skerry_tools.plan.plan import RunPlan
from skerry_tools.plan.traffic import Deployment, PlannedSite

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
    at, sync, binding = plan.at, plan.at.load.sync, plan.judged[0]
    if not plan.feasible:
        fixed = ", or ".join(plan.fixes[:3]) or "no single setting is enough"
        others = sum(not c.holds for c in plan.judged[1:])
        more = f"; {others} more below" if others else ""
        way = ", ".join(f"{name}={n}" for name, n in plan.way_out.items())
        out = f". All holds with {way}" if way else ""
        return f"Not feasible: {binding.text}: {fixed}{more}{out}."
    settings = (
        f"{_sizes(at)} on {several(at.learners, 'learner')} at "
        f"{several(len(at.sites), 'site')} with H={sync.h_steps} P={sync.fragments} "
        f"tau={sync.overlap_steps} K={sync.quorum}, "
        f"{sync.contribution_scheme} up and {sync.global_scheme} down"
    )
    how = "all communication hidden" if sync.overlap_steps else "learners stop for rounds"
    mine, fast = plan.methods[0], shown(plan.speed_up(1), "x")
    if not plan.question.bare_tokens:
        took, tokens = shown(mine.wall_s(plan.tokens), "s"), shown(plan.tokens, "token")
        how += f", {shown(mine.tokens_s, 'tokens/s')}, {tokens} in {took}"
    rest, open_ = "", [site for site in at.sites.values() if site.table.memory is None]
    if open_:
        need = max(memory.learner_need(at, site).total for site in open_)
        rest = f" Not judged: {shown(need, 'B')} of memory on a chip (sites.<name>.memory)."
    tight = f"{fast} synchronous data-parallel; tightest: {binding.text}"
    return f"Feasible: {settings}: {how}, {tight}.{rest}"


def _sizes(at: Deployment) -> str:
    """Say how large the model is: what is trained of it, and what a token sees of it."""
    said, whole = shown(at.load.parameters, "param"), at.model.parameters
    if at.model.frozen:
        said += f" trained of {shown(whole, 'param')}"
    experts = at.model.arch and at.model.arch.experts
    return said + (f" ({shown(at.model.active, 'param')} active)" if experts else "")


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
        if any(far(rate, 0.1e9, 1e12) for rate in site.rates):
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
    at, load = plan.at, plan.at.load
    yield from _of_learners(at)
    if "write" not in at.hub.model_fields_set:
        took = shown(measured.BROKER_WRITE_B_S, "B/s")
        yield f"hub.write is not given: one broker on two shared cores stored {took} here"
    each_s = measured.COMMIT_CPU_S[load.outer_vectors > 0]
    if (cores := each_s * load.parameters / at.period_s) > 1:
        took = f"whole commits took {each_s * 1e9:.0f} CPU s for 1e9 parameters here: {cores:.1f}"
        yield f"{took} cores of the syncers all the time; judged are decode, merge and encode alone"
    initial, log = memory.initial_bytes(at), at.run.log
    if "window_bytes" not in log.model_fields_set and initial > log.window_bytes:
        twice = f"the broker reserves {shown(2 * initial, 'B')} for contributions"
        least = f"log.window_bytes={initial:.0f} at least, if that is too much"
        yield f"{twice} (twice what all learners send at the beginning): {least}"
    if at.learners > MOST_LEARNERS:
        scores = "the paper's average score was 54.4, 55.0, 55.4, 53.4 for M = 2, 4, 8, 16"
        join = f"join learners of a site until {MOST_LEARNERS} are left"
        yield f"{at.learners} learners: {scores}; {join}"
    if at.learners == 1:
        yield "1 learner: there is nothing to synchronise (mode=single)"


def _of_learners(at: Deployment) -> Iterator[str]:
    sites = at.sites.values()
    if meshes := ", ".join(site.name for site in sites if site.table.chips > MACHINE):
        one = f"learners of more than {MACHINE} chips, at {meshes}, are a process on each machine"
        yield f"{one} (learner.processes); their moments begin afresh after a restart"
    if at.model.frozen:
        yield "only adapters are trained and sent; each site has a copy of what is frozen"
    elif at.model.arch and at.model.arch.experts:
        yield "rounds move all parameters, a step computes with the active ones only"
    remote = [one for one in sites if not one.local and at.link(one) != one.rates]
    links = {at.link(one): one.name for one in remote}
    for (up, down), name in links.items():
        used = f"{shown(up, 'bit/s')} up and {shown(down, 'bit/s')} down of the link of {name}"
        way = "larger sync.chunk_bytes and max_payload of the broker (hub.max_payload) use more"
        yield f"chunks on their way use {used}: {way}"


def _tables(plan: RunPlan, far: set[str]) -> Iterator[FigureTable]:
    """Yield every table; ``far`` are the models that are extrapolated: links, cpu, tokens."""
    at = plan.at

    def kind(*bases: str) -> Kind:
        return "derived" if far.isdisjoint(bases) else "extrapolated"

    judged: dict[str, Figures] = {}
    for item in plan.judged:
        judged[item.what.removeprefix("site ")] = {
            "of it": Figure(item.ratio, "share", item.why),
            "needs": Figure(item.need, item.unit, item.why),
            "has": Figure(item.has, item.unit, item.why),
        }
    yield FigureTable("judged", "Judged: need over what there is", judged)
    until = f"Until {shown(plan.tokens, 'token')} are trained on"
    notes = [f"  {way.name}: {way.convention}" for way in plan.methods]
    yield FigureTable("compared", until, _compared(plan), kind("links", "tokens"), notes)
    yield FigureTable("rounds", "Rounds", _rounds(at), kind("links"))
    sites = {name: _site(at, site) for name, site in at.sites.items()}
    yield FigureTable("links", "Sites: links, rounds, memory", sites, kind("links"))
    hub, links, cpu = at.hub_round, kind("links"), kind("cpu")
    stored, average = "contributions and state, one replica", "on average"
    rates = {
        "ingress": Figure(hub.ingress_bits_s, "bit/s", f"all contributions, {average}", links),
        "egress": Figure(hub.egress_bits_s, "bit/s", f"all global fragments, {average}", links),
        "broker_stores": Figure(hub.broker_bytes_s, "B/s", stored, links),
        "syncer_busy": Figure(hub.busy_share, "share", "of one syncer's time, per shard", cpu),
        "syncer_in_a_round": Figure(hub.syncer_s, "s", "decode, merge, encode, write", cpu),
    }
    yield FigureTable("hub", "Hub: broker and syncers", rates)
    yield FigureTable("services", "Memory of services, disks", _services(plan))


def _compared(plan: RunPlan) -> dict[str, Figures]:
    currency, missing = plan.at.plan.currency, "no prices given: price_chip_hour, price_egress_gb"
    rows: dict[str, Figures] = {}
    for index, way in enumerate(plan.methods):
        chips = way.chips_cost(plan.at, plan.tokens)
        egress = way.egress_cost(plan.at, plan.tokens)
        total = None if chips is None else chips + (egress or 0.0)
        costs = {"chips_cost": chips, "egress_cost": egress, "cost": total}
        rows[way.name] = {
            "tokens/s": Figure(way.tokens_s, "tokens/s", way.convention),
            "utilisation": Figure(way.utilisation, "share", "time in compute"),
            "goodput": Figure(way.goodput, "share", "plan.goodput, chip_mtbi"),
            "time": Figure(way.wall_s(plan.tokens), "s", "until all tokens are trained on"),
            "site_sends": Figure(max(way.sent.values()), "bit", "the busiest site, in H steps"),
            "speed_up_of_this_plan": Figure(plan.speed_up(index), "x", "tokens/s, with goodput"),
        } | {name: Figure(c, currency, missing if c is None else "") for name, c in costs.items()}
    return rows


def _rounds(at: Deployment) -> Figures:
    load, up, down = at.load, at.load.sync.contribution_scheme, at.load.sync.global_scheme
    raw, holds = "measured on Gaussian data, headers included; raw", "none: learners stop"
    room = load.room_steps if load.sync.overlap_steps else None
    up_words = f"{up}: {raw} {measured.RAW_BITS[up]:.2f}"
    down_words = f"{down}: {raw} {measured.RAW_BITS[down]:.2f}"
    active, flops = "that a token is multiplied by", "of a token of a training step"
    return {
        "parameters": Figure(load.parameters, "param", "those that are trained and synchronised"),
        "all_parameters": Figure(at.model.parameters, "param", "frozen ones included"),
        "active_parameters": Figure(at.model.active, "param", active),
        "operations": Figure(at.model.token_flops, "FLOP", flops),
        "shards": Figure(load.sync.shards, "1", "syncers that share the fragments"),
        "up_bits_per_parameter": Figure(load.up_bits, "bit", up_words),
        "down_bits_per_parameter": Figure(load.down_bits, "bit", down_words),
        "fragment": Figure(load.fragment, "param", "the largest of P"),
        "contribution": Figure(load.fragment * load.up_bits, "bit", "one learner's, one round"),
        "global_fragment": Figure(load.fragment * load.down_bits, "bit", "for each learner"),
        "fragment_returns_after": Figure(at.period_s, "s", "H t, t of the K-th fastest learner"),
        "room": Figure(room, "step", f"a round may last without delaying others; {holds}"),
    }


def _site(at: Deployment, site: PlannedSite) -> Figures:
    one, need = at.site_rounds[site.name], memory.learner_need(at, site)
    average, held = "all fragments pass once in H steps", "on each chip of its mesh"
    parts = ("state", "gradients", "activations", "flight")
    return {
        "step": Figure(site.step_s, "s", "of each of its learners"),
        "up_average": Figure(one.up_bits_s, "bit/s", average),
        "down_average": Figure(one.down_bits_s, "bit/s", average),
        "round": Figure(one.round_s, "s", "stages one after another"),
        "slack": Figure(one.slack_steps, "step", "the room less the round"),
        **{f"{name}_memory": Figure(getattr(need, name), "B", held) for name in parts},
        "memory_per_chip": Figure(need.total, "B", "all of that at once"),
    }


def _services(plan: RunPlan) -> Figures:
    """Return what services hold, and what log and store take of disks."""
    at, load, log = plan.at, plan.at.load, plan.at.run.log
    state = measured.STATE_COPIES * load.state_bytes * load.parameters * log.replicas
    sent = at.learners * load.parameters * load.up_bits / 8 / at.period_s * log.window_s
    newest, one = at.run.checkpoint.keep_newest, 4 * (1 + load.outer_vectors) * load.parameters
    fed_back = 8 * load.parameters * scheme_of(load.sync.contribution_scheme).feedback
    hours = f"all of the last {log.window_s / 3600:g} h (log.window_s), all replicas"
    of_shard = "f32 master, outer state, result, contributions"
    return {
        "syncer_of_a_shard": Figure(memory.syncer_bytes(at), "B", of_shard),
        "learner_host": Figure(fed_back, "B", "what int2 feeds back, beside its devices' memory"),
        "disk_of_state": Figure(state, "B", f"{measured.STATE_COPIES} x what a commit stores"),
        "disk_of_contributions": Figure(sent * log.replicas, "B", hours),
        "disk_of_checkpoints": Figure(one * newest, "B", f"the newest {newest}: f32, outer state"),
    }
