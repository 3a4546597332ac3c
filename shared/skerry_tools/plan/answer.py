"""A plan as its reader gets it: the verdict first, then figures with their conventions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry_tools.plan import costs
from skerry_tools.plan.advice import advise
from skerry_tools.plan.doubts import Doubts, doubts
from skerry_tools.plan.figures import LEGEND, Figure, Grid, Json, Kind, Sheet, given, shown
from skerry_tools.plan.measured import BROKER_WRITE_B_S, RAW_BITS, encode_s, merge_s
from skerry_tools.plan.verdict import utilisation

if TYPE_CHECKING:
    from skerry_tools.plan.plan import Plan
    from skerry_tools.plan.verdict import Constraint


def verdict(plan: Plan) -> str:
    """Return the first line: feasible or not, and the binding constraint with its fix."""
    load, binding = plan.rounds.load, plan.binding
    if not plan.feasible and binding is not None:
        fixed = ", or ".join(plan.fixes[:3]) or "no single setting mends it"
        others = [c for c in plan.judged[1:] if not c.holds and not c.what.endswith(binding.what)]
        more = f"; {len(others)} more below" if others else ""
        way = ", ".join(f"{path.removeprefix('sync.')}={n}" for path, n in plan.way_out.items())
        out = f". All holds with {way}" if way else ""
        return f"Not feasible: {binding.text}: {fixed}{more}{out}."
    pace, bill = plan.paces[0], plan.bills[0]
    how = "all communication hidden" if load.overlap_steps else "learners stop for rounds"
    settings = (
        f"{shown(load.parameters, 'param')} on {_several(plan.rounds.learners, 'learner')} at "
        f"{_several(len(plan.rounds.links), 'site')} with H={load.h_steps} P={load.fragments} "
        f"tau={load.overlap_steps} K={load.quorum}, {load.up_scheme} up and {load.down_scheme} down"
    )
    pace_text = (
        ""
        if plan.request.bare_tokens
        else f"{shown(pace.tokens_s, 'tokens/s')}, {shown(plan.tokens, 'token')} in "
        f"{shown(bill.wall_s, 's')}, "
    )
    fast = f"{shown(speed_up(plan, 1), 'x')} synchronous data-parallel"
    result = f"{how}, {pace_text}{fast}"
    tight = f"; tightest: {binding.text}" if binding else ""
    return f"Feasible: {settings}: {result}{tight}."


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def speed_up(plan: Plan, index: int) -> float:
    """Return how many times as fast the plan is as its baseline ``index``, goodput included."""
    mine, other = plan.paces[0], plan.paces[index]
    return mine.tokens_s * mine.goodput / (other.tokens_s * other.goodput)


def lines(plan: Plan) -> list[str]:
    """Return the whole answer as text."""
    told = [verdict(plan), ""]
    told += ["Judged: need over what there is", *(_judged(c) for c in plan.judged), ""]
    for part in parts(plan):
        told += [*part.lines(), ""]
    advice = advise(plan)
    told += ["Advice", *(f"  {a.letter}: {a.say} ({a.why})" for a in advice), ""]
    remarks = [*doubts(plan).reasons, *_watch(plan)]
    told += (["Mind", *(f"  {remark}" for remark in remarks), ""]) if remarks else []
    if plan.request.source:
        told += [f"Source: {plan.request.source}"]
        told += [f"  {path}: {status}" for path, status in plan.request.status.items()]
    return [*told, LEGEND]


def _judged(item: Constraint) -> str:
    return f"  {shown(item.ratio, 'share'):>9}{'  ' if item.holds else ' !'} {item.text}"


def as_json(plan: Plan) -> dict[str, Json]:
    """Return the whole answer for machines."""
    remarks = doubts(plan)
    tables: dict[str, Json] = {part.name: part.json() for part in parts(plan)}
    judged: list[Json] = [
        {
            "what": c.what,
            "need": c.need,
            "has": c.has,
            "unit": c.unit,
            "why": c.why,
            "holds": c.holds,
        }
        for c in plan.judged
    ]
    return {
        "verdict": verdict(plan),
        "feasible": plan.feasible,
        "binding": judged[0] if judged else None,
        "fixes": list(plan.fixes),
        "chosen": dict(plan.chosen),
        "way_out": dict(plan.way_out),
        "constraints": judged,
        **tables,
        "advice": [{"letter": a.letter, "say": a.say, "why": a.why} for a in advise(plan)],
        "extrapolated_because": list(remarks.reasons),
        "mind": list(_watch(plan)),
        "source": plan.request.source,
        "status": dict(plan.request.status),
    }


def parts(plan: Plan) -> list[Sheet | Grid]:
    """Return every table of figures."""
    remarks = doubts(plan)
    return [
        _settings(plan),
        _sites(plan),
        _rounds(plan, remarks),
        _links(plan, remarks),
        _hub(plan, remarks),
        costs.memory(plan.rounds, plan.fleet.chips),
        costs.disk(
            plan.rounds, plan.request.run.log, plan.request.run.checkpoint, plan.bills[0].wall_s
        ),
        _compared(plan, remarks),
    ]


def _settings(plan: Plan) -> Sheet:
    load, sync = plan.rounds.load, plan.request.run.sync

    def setting(path: str, value: float, words: str) -> Figure:
        if path in plan.chosen:
            return Figure(value, "1", Kind.DERIVED, f"{words}; {path} was open: chosen here")
        return given(value, "1", f"{words} ({path})")

    figures = {
        "H": setting("sync.h_steps", load.h_steps, "steps between two rounds of a fragment"),
        "P": setting("sync.fragments", load.fragments, "fragments"),
        "tau": setting(
            "sync.overlap_steps", load.overlap_steps, "steps that a round is meant to take"
        ),
        "K": setting("sync.quorum", load.quorum, "contributions after which a round may close"),
        "grace": setting("sync.grace_gamma", sync.grace_gamma, "share of a round's room for grace"),
        "shards": setting("sync.shards", load.shards, "syncers that share the fragments"),
        "parameters": given(load.parameters, "param", "those that are synchronised"),
    }
    return Sheet("settings", f"Settings (mode {plan.request.run.mode})", figures)


def _sites(plan: Plan) -> Grid:
    rows: dict[str, dict[str, Figure]] = {}
    for name, site in plan.request.scene.sites.items():
        link = plan.rounds.links[name]
        kind = Kind.INPUT if site.step_time is not None else Kind.DERIVED
        step = "pure compute" if kind is Kind.INPUT else "6 x active x tokens / FLOP/s"
        rows[name] = {
            "learners": given(link.learners, "1"),
            "chips_each": given(site.chips, "1"),
            "step": Figure(link.step_s, "s", kind, step),
            "tokens_per_step": given(plan.fleet.tokens[name], "token", "of each learner"),
            "up": _rate(site.up, link.up_bits_s, measured=site.measured),
            "down": _rate(site.down or site.up, link.down_bits_s, measured=site.measured),
            "rtt": given(site.rtt, "s", "to the hub and back"),
        }
    hub = plan.request.scene.hub.site
    notes = [f"the hub is at {hub}: its learners use no wide-area link"] if hub else []
    return Grid("sites", "Sites (links after derating, to and from the hub)", rows, notes)


def _rate(nominal: float, has: float, *, measured: bool) -> Figure:
    if measured:
        return given(has, "bit/s", "measured")
    if has == nominal:
        return given(has, "bit/s", "as given")
    return Figure(has, "bit/s", Kind.DERIVED, f"{has / nominal:.0%} of {shown(nominal, 'bit/s')}")


def _rounds(plan: Plan, remarks: Doubts) -> Sheet:
    rounds, load = plan.rounds, plan.rounds.load
    up, down = load.up_bits, load.down_bits
    of_gaussian = "measured on Gaussian data with zstd, headers included; raw {:.2f}"
    figures = {
        "up_bits_per_parameter": given(
            up, "bit", f"{load.up_scheme}: " + of_gaussian.format(RAW_BITS[load.up_scheme])
        ),
        "down_bits_per_parameter": given(
            down, "bit", f"{load.down_scheme}: " + of_gaussian.format(RAW_BITS[load.down_scheme])
        ),
        "fragment": remarks.links(rounds.fragment, "param", "the largest of P"),
        "contribution": remarks.links(rounds.fragment * up, "bit", "one learner's, one round"),
        "global_fragment": remarks.links(rounds.fragment * down, "bit", "for each learner"),
        "rounds_every": remarks.links(
            rounds.period_s / load.fragments, "s", "H t / P, t of the K-th fastest learner"
        ),
        "fragment_returns_after": remarks.links(rounds.period_s, "s", "H t"),
        "H_in_effect": remarks.links(
            load.h_steps / rounds.on_schedule, "step", "longer than H where a link is too slow"
        ),
        "room": remarks.links(
            rounds.room_steps if load.overlap_steps else None,
            "step",
            "how long a round may live without holding up others; none: learners stop",
        ),
        "due_at_the_same_step": remarks.links(rounds.together, "1", "fragments; ceil(P / H)"),
    }
    return Sheet("rounds", "Rounds", figures)


def _links(plan: Plan, remarks: Doubts) -> Grid:
    rounds = plan.rounds
    rows: dict[str, dict[str, Figure]] = {}
    for name, link in rounds.links.items():
        factor = rounds.deadline_factor(link) if rounds.load.overlap_steps else 0.0
        row: dict[str, Figure] = {}
        for way, has, average in (
            ("up", link.up_bits_s, rounds.up_throughput(link)),
            ("down", link.down_bits_s, rounds.down_throughput(link)),
        ):
            deadline = None if factor is None else 0.0 if link.local else has * factor
            row[f"{way}_throughput"] = remarks.links(average, "bit/s", "m b N / (H t)")
            row[f"{way}_deadline"] = remarks.links(
                deadline, "bit/s", "so that a round ends in its room; none: no rate is enough"
            )
            need = None if deadline is None else max(average, deadline)
            named = "throughput" if deadline is not None and average >= deadline else "deadline"
            row[f"{way}_needed"] = remarks.links(need, "bit/s", f"{named} bound, the larger")
        tau = rounds.tau_that_fits(link)
        row |= {
            "round": remarks.links(rounds.round_s(link), "s", "stages one after another"),
            "slack": remarks.links(rounds.slack_steps(link), "step", "the room less the round"),
            "tau_fits": remarks.links(tau, "1", "least tau with room for it; none: none below H"),
        }
        rows[name] = row
    return Grid(
        "links",
        "Links: bandwidth for full hiding",
        rows,
        (
            "throughput: all fragments pass once in H steps; deadline: one round ends in the room",
            "that it has, both directions growing in proportion; the larger of the two is needed",
        ),
    )


def _hub(plan: Plan, remarks: Doubts) -> Sheet:
    rounds, load, hub = plan.rounds, plan.rounds.load, plan.rounds.hub
    merge = merge_s(load.up_scheme, rounds.fragment, rounds.learners)
    encode = encode_s(load.down_scheme, rounds.fragment, hub.cores)
    figures = {
        "ingress": remarks.links(rounds.ingress, "bit/s", "all contributions, on average"),
        "egress": remarks.links(rounds.egress, "bit/s", "all global fragments, on average"),
        "syncer_reads": remarks.links(
            rounds.learners * load.up_bits * load.parameters / rounds.period_s / load.shards,
            "bit/s",
            "contributions of a shard, from the broker",
        ),
        "syncer_writes": remarks.links(
            8 * load.state_bytes * load.parameters / rounds.period_s / load.shards,
            "bit/s",
            "parameters (unless f32), master and outer state of a shard, to the broker",
        ),
        "broker_stores": remarks.links(
            rounds.broker_write, "B/s", "contributions and committed state, one replica"
        ),
        "syncer_busy": remarks.cpu(
            rounds.syncer_busy, "share", "of one syncer's time, per shard; merge rate measured"
        ),
        "merge": remarks.cpu(merge, "s", f"one fragment of {rounds.learners} contributions"),
        "encode": remarks.cpu(encode, "s", f"the new fragment in {load.down_scheme}"),
        "syncer_in_a_round": remarks.cpu(rounds.syncer_s, "s", "decode, merge, encode, write"),
    }
    return Sheet("hub", "Hub: broker and syncers", figures)


def _compared(plan: Plan, remarks: Doubts) -> Grid:
    currency = plan.request.scene.plan.currency
    rows: dict[str, dict[str, Figure]] = {}
    for index, (pace, bill) in enumerate(zip(plan.paces, plan.bills, strict=True)):
        rows[pace.name] = {
            "tokens/s": remarks.tokens(pace.tokens_s, "tokens/s", pace.convention),
            "utilisation": remarks.links(pace.utilisation, "share", "time in compute"),
            "goodput": remarks.links(
                pace.goodput * plan.request.scene.plan.goodput, "share", "plan.goodput, chip_mtbi"
            ),
            "time": remarks.tokens(bill.wall_s, "s", f"until {shown(plan.tokens, 'token')}"),
            "site_sends": remarks.links(pace.bits, "bit", "the busiest site, in H steps"),
            "chips_cost": costs.money(bill.chips, currency, "all chips and the hub, all the time"),
            "egress_cost": costs.money(bill.egress, currency, "bytes that leave priced places"),
            "cost": costs.money(bill.total, currency, "chips and egress"),
            "speed_up_of_this_plan": remarks.links(
                1.0 if not index else speed_up(plan, index),
                "x",
                "tokens a second, goodput included",
            ),
        }
    notes = [f"{pace.name}: {pace.convention}" for pace in plan.paces]
    if utilisation(plan.rounds) < 1:
        notes.append("this plan stops for rounds: see utilisation")
    return Grid("compared", f"Until {shown(plan.tokens, 'token')} are trained on", rows, notes)


def _watch(plan: Plan) -> list[str]:
    """Return what no constraint says and a reader should know."""
    rounds, found = plan.rounds, list[str]()
    write = rounds.broker_write
    if rounds.hub.write_bytes_s is None and write > BROKER_WRITE_B_S / 2:
        found.append(
            f"the broker must store {shown(write, 'B/s')}: give hub.write to have that judged "
            f"(one broker on two shared cores took {shown(BROKER_WRITE_B_S, 'B/s')} here)"
        )
    need = costs.first_offers_bytes(rounds)
    if plan.limits.window_bytes is None and need > plan.request.run.log.window_bytes:
        found.append(
            f"the broker reserves {shown(2 * need, 'B')} for contributions (twice what all learners"
            f" offer at the beginning): log.window_bytes={need:.0f} at least, if that is too much"
        )
    return found
