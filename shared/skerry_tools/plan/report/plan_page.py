"""A plan's pictures: utilisation by bandwidth, speed-up by step time, and what tightens it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from skerry_tools.plan.answer import parts, speed_up, verdict
from skerry_tools.plan.baselines import others, ours
from skerry_tools.plan.figures import Grid
from skerry_tools.plan.report.page import Part, Report, Rows
from skerry_tools.plan.report.svg import Axis, Bar, Series, lines, tornado
from skerry_tools.plan.verdict import constraints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry_tools.plan.figures import Sheet
    from skerry_tools.plan.links import Link, Rounds
    from skerry_tools.plan.plan import Plan

BANDWIDTHS = tuple(10 ** (7 + power / 8) for power in range(41))
"""From 10 Mbit/s to 1 Tbit/s."""
SHORT = ("this plan", "data-parallel", "elastic", "blocking DiLoCo")
"""Methods by the index of their pace, short enough for a legend."""
STEP_FACTORS = tuple(10 ** (power / 10 - 1) for power in range(21))


def report(plan: Plan) -> Report:
    """Return the report of a plan."""
    return Report(
        title="Plan",
        lead=verdict(plan),
        parts=_with_data_last(_bandwidth(plan), _steps(plan), _swing(plan), _figures(plan)),
    )


def _with_data_last(*found: Part) -> tuple[Part, ...]:
    """Return pictures first and figures after them; what the pictures are drawn from comes last."""
    *pictures, figures = found
    data = Part(
        "What the pictures are drawn from", tables=tuple(t for p in pictures for t in p.tables)
    )
    return (*(replace(part, tables=()) for part in pictures), figures, data)


def _bandwidth(plan: Plan) -> Part:
    table = plan.request.scene.plan
    found: dict[str, list[float]] = {"this plan": []}
    for rate in BANDWIDTHS:
        rounds = _with_rate(plan.rounds, rate)
        fleet = replace(plan.fleet, links=rounds.links)
        found["this plan"].append(rounds.on_schedule)
        for pace in others(rounds, fleet, table):
            if pace.name != "elastic data-parallel":
                found.setdefault(pace.name, []).append(pace.utilisation)
    drawn = lines(
        "Utilisation against bandwidth",
        [
            Series(name, tuple(zip(BANDWIDTHS, values, strict=True)))
            for name, values in found.items()
        ],
        Axis("bandwidth of every site, each way, bit/s", log=True),
        Axis("share of time in compute", least=0, most=1, percent=True),
    )
    text = (
        "Learners of this plan never wait: drawn is the share of its rounds that come in time.",
        "The baselines stand still where bandwidth is short.",
    )
    rows = tuple(zip(BANDWIDTHS, *found.values(), strict=True))
    heads = ("bandwidth_bit_s", *found)
    name = "utilisation-against-bandwidth"
    return Part("Bandwidth", text, ((name, drawn),), (Rows(name, heads, rows),))


def _steps(plan: Plan) -> Part:
    table = plan.request.scene.plan
    found: dict[str, list[float]] = {}
    for factor in STEP_FACTORS:
        rounds = _with_steps(plan.rounds, factor)
        fleet = replace(plan.fleet, links=rounds.links)
        paces = (ours(rounds, fleet, table), *others(rounds, fleet, table))
        changed = replace(plan, rounds=rounds, fleet=fleet, paces=paces)
        for index in range(1, len(paces)):
            found.setdefault(SHORT[index], []).append(speed_up(changed, index))
    base = plan.fleet.slowest_s
    seconds = tuple(base * factor for factor in STEP_FACTORS)
    drawn = lines(
        "Speed-up over other methods against step time",
        [Series(name, tuple(zip(seconds, values, strict=True))) for name, values in found.items()],
        Axis("step time of the slowest site, s", log=True),
        Axis("times as fast", log=True),
    )
    rows = tuple(zip(seconds, *found.values(), strict=True))
    name = "speed-up-against-step-time"
    return Part(
        "Step time",
        ("All sites' steps change together; bandwidth, H, P and tau stay as they are.",),
        ((name, drawn),),
        (Rows(name, ("step_s", *found), rows),),
    )


def _swing(plan: Plan) -> Part:
    base = _tightness(plan, plan.rounds)
    bars = [
        Bar(name, _tightness(plan, low), _tightness(plan, high), "half", "double")
        for name, low, high in _halved_and_doubled(plan.rounds)
    ]
    drawn = tornado(
        "What tightens the plan: each input halved and doubled",
        bars,
        base,
        Axis("need over what there is, of the tightest constraint"),
    )
    rows = tuple((bar.name, bar.low, base, bar.high) for bar in bars)
    heads = ("input", "halved", "as it is", "doubled")
    text = ("Blue: halved. Orange: doubled. Above 1 the plan is not feasible.",)
    return Part("Sensitivity", text, (("sensitivity", drawn),), (Rows("sensitivity", heads, rows),))


def _tightness(plan: Plan, rounds: Rounds) -> float:
    judged = constraints(rounds, plan.limits)
    return judged[0].ratio if judged else 0.0


def _halved_and_doubled(rounds: Rounds) -> Iterator[tuple[str, Rounds, Rounds]]:
    load = rounds.load

    def all_links(change: Callable[[Link, float], Link]) -> tuple[Rounds, Rounds]:
        half = _linked(rounds, lambda link: change(link, 0.5))
        return half, _linked(rounds, lambda link: change(link, 2.0))

    yield "up-links", *all_links(lambda k, f: replace(k, up_bits_s=k.up_bits_s * f))
    yield "down-links", *all_links(lambda k, f: replace(k, down_bits_s=k.down_bits_s * f))
    yield "round trips", *all_links(lambda k, f: replace(k, rtt_s=k.rtt_s * f))
    yield "step time", *all_links(lambda k, f: replace(k, step_s=k.step_s * f))
    for name, field, now in (
        ("H", "h_steps", load.h_steps),
        ("P", "fragments", load.fragments),
        ("tau", "overlap_steps", load.overlap_steps),
        ("shards", "shards", load.shards),
    ):
        if now:
            half, double = (_set(rounds, field, n) for n in (max(1, now // 2), now * 2))
            yield name, half, double


def _set(rounds: Rounds, field: str, count: int) -> Rounds:
    load = rounds.load
    changed = {
        "h_steps": lambda: replace(load, h_steps=count),
        "fragments": lambda: replace(load, fragments=count),
        "overlap_steps": lambda: replace(load, overlap_steps=count),
        "shards": lambda: replace(load, shards=count),
    }[field]()
    return replace(rounds, load=changed)


def _with_rate(rounds: Rounds, rate: float) -> Rounds:
    return _linked(rounds, lambda link: replace(link, up_bits_s=rate, down_bits_s=rate))


def _with_steps(rounds: Rounds, factor: float) -> Rounds:
    return _linked(rounds, lambda link: replace(link, step_s=link.step_s * factor))


def _linked(rounds: Rounds, change: Callable[[Link], Link]) -> Rounds:
    return replace(rounds, links={name: change(link) for name, link in rounds.links.items()})


def _figures(plan: Plan) -> Part:
    return Part(
        "Figures",
        ("Kinds: input, derived, extrapolated. Powers of 1000 throughout.",),
        tables=tuple(_rows(part) for part in parts(plan)),
    )


def _rows(part: Sheet | Grid) -> Rows:
    if isinstance(part, Grid):
        found = [(f"{row}: {key}", f) for row, all_ in part.rows.items() for key, f in all_.items()]
    else:
        found = list(part.figures.items())
    heads = (part.title, "value", "unit", "shown", "kind", "convention")
    rows = tuple(
        (key, "" if f.value is None else float(f.value), f.unit, f.text, f.kind.value, f.convention)
        for key, f in found
    )
    return Rows(part.name, heads, rows)
