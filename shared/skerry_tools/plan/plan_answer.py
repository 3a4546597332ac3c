"""A plan as its reader gets it: the verdict first, then figures with their conventions."""

from __future__ import annotations

from collections.abc import Iterator

from skerry_tools.plan import measured
from skerry_tools.plan.figures import LEGEND, Answer, Json, several, shown, sourced
from skerry_tools.plan.plan import RunPlan
from skerry_tools.plan.plan_tables import bandwidth_chart, plan_tables
from skerry_tools.plan.traffic import Deployment

TIMES = 10
"""Figures are extrapolated ten times beyond what Streaming DiLoCo's table was checked on."""
CHECKED_LEARNERS, CHECKED_H = 16, 1000
"""Decoupled DiLoCo has M up to 16; H up to 500 is published in DiLoCo."""
MOST_LEARNERS, SMALL_SHARE = 8, 0.1
"""Above 8 learners the score of Decoupled DiLoCo (arXiv 2604.21428) fell."""


def answer(plan: RunPlan) -> Answer:
    """Return a plan as text, JSON and pictures."""
    caveats, notes = list(_caveats(plan)), [*_notes(plan), *_notes_on_sites(plan)]
    extrapolated: list[Json] = [f"extrapolated: {why}" for _, why in caveats]
    tables = plan_tables(plan, {basis for basis, _ in caveats})
    asked = plan.question.tables
    fields = ("what", "need", "has", "unit", "why", "holds")
    judged: list[Json] = [{key: getattr(c, key) for key in fields} for c in plan.judged]
    json: dict[str, Json] = {
        "verdict": verdict(plan),
        "feasible": plan.feasible,
        "binding": judged[0] if judged else None,
        "fixes": list(plan.fixes),
        "chosen": dict(plan.chosen),
        "way_out": dict(plan.way_out),
        "constraints": judged,
        **{part.name: part.json() for part in tables},
        "extrapolated_because": extrapolated,
        "mind": list[Json](notes),
        "source": asked.source,
        "status": dict(asked.status),
    }
    text = [verdict(plan), "", "Judged: need over what there is", *_judged(plan)]
    mind = [*extrapolated, *notes]
    text += ["", "Mind", *(f"  {note}" for note in mind)] if mind else []
    text += [line for part in tables for line in ("", *part.lines())]
    return Answer(
        text=[*text, "", *sourced(asked.source, asked.status), LEGEND],
        json=json,
        tables=tables,
        charts=lambda: [bandwidth_chart(plan)],
        exit_code=0 if plan.feasible else 4,
    )


def verdict(plan: RunPlan) -> str:
    """Return the first line: feasible or not, what binds and its fix, what was not judged."""
    load, sync = plan.at.load, plan.at.load.sync
    binding = plan.judged[0] if plan.judged else None
    if binding is not None and not plan.feasible:
        fixed = ", or ".join(plan.fixes[:3]) or "no single setting is enough"
        others = [c for c in plan.judged[1:] if not c.holds and not c.what.endswith(binding.what)]
        more = f"; {len(others)} more below" if others else ""
        way = ", ".join(f"{path.removeprefix('sync.')}={n}" for path, n in plan.way_out.items())
        out = f". All holds with {way}" if way else ""
        return f"Not feasible: {binding.text}: {fixed}{more}{out}."
    settings = (
        f"{shown(load.parameters, 'param')} on {several(plan.at.learners, 'learner')} at "
        f"{several(len(plan.at.sites), 'site')} with H={sync.h_steps} P={sync.fragments} "
        f"tau={sync.overlap_steps} K={sync.quorum}, "
        f"{sync.contribution_scheme} up and {sync.global_scheme} down"
    )
    how = "all communication hidden" if sync.overlap_steps else "learners stop for rounds"
    speed, took_s = shown(plan.methods[0].tokens_s, "tokens/s"), shown(plan.bills[0].wall_s, "s")
    if not plan.question.bare_tokens:
        how += f", {speed}, {shown(plan.tokens, 'token')} in {took_s}"
    tight = f"; tightest: {binding.text}" if binding else ""
    unjudged = " and ".join(_unjudged(plan.at))
    rest = f" Not judged: {unjudged}." if unjudged else ""
    fast = shown(plan.speed_up(1), "x")
    return f"Feasible: {settings}: {how}, {fast} synchronous data-parallel{tight}.{rest}"


def _unjudged(at: Deployment) -> Iterator[str]:
    """Name what a plan needs where it is not given what there is."""
    chips = [site.table.chips for site in at.sites.values() if site.table.memory is None]
    if chips:
        need = shown(at.load.learner_bytes / min(chips), "B")
        yield f"{need} of memory on a chip (sites.<name>.memory)"
    if at.hub.write is None:
        stored = shown(at.hub_round.broker_bytes_s, "B/s")
        yield f"{stored} into the broker (hub.write)"


def _judged(plan: RunPlan) -> list[str]:
    """Return a line for each constraint, and one for several sites that are alike."""
    alike: dict[str, list[str]] = {}
    for item in plan.judged:
        name = item.what.split(" ")[1] if item.what.startswith("site ") else ""
        mark = "  " if item.holds else " !"
        line = f"  {shown(item.ratio, 'share'):>9}{mark} {item.text}"
        alike.setdefault(line.replace(f"site {name} ", "site {} "), []).append(name)
    return [
        line.replace("site {} ", f"site {names[0]}{_and_more(names)} ")
        for line, names in alike.items()
    ]


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} alike)" if len(names) > 1 else ""


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
        one = "today's code runs one device per learner: learners of several chips"
        yield f"{one}, at {meshes}, cannot run yet, and only their traffic is planned"
    if at.hub.write is None and stored > measured.BROKER_WRITE_B_S / 2:
        here = f"one broker on two shared cores took {shown(measured.BROKER_WRITE_B_S, 'B/s')} here"
        need = f"the broker must store {shown(stored, 'B/s')}"
        yield f"{need}: give hub.write to have that judged ({here})"
    each_s = measured.COMMIT_CPU_S[at.load.outer_vectors > 0]
    cores = each_s * at.load.parameters / at.period_s
    if cores > 1:
        took = f"whole commits took {each_s * 1e9:.0f} CPU s for 1e9 parameters here: {cores:.1f}"
        yield f"{took} cores of the syncers all the time; judged are decode, merge and encode alone"
    if at.window_bytes is None and at.initial_bytes > plan.question.run.log.window_bytes:
        twice = f"the broker reserves {shown(2 * at.initial_bytes, 'B')} for contributions"
        least = f"log.window_bytes={at.initial_bytes:.0f} at least, if that is too much"
        yield f"{twice} (twice what all learners send at the beginning): {least}"


def _notes_on_sites(plan: RunPlan) -> Iterator[str]:
    """Yield which learners a plan would do better without, or with one of them."""
    sites, whole = plan.at.sites.values(), sum(site.tokens_s for site in plan.at.sites.values())
    if plan.at.learners > MOST_LEARNERS:
        scores = "the paper's average score was 54.4, 55.0, 55.4, 53.4 for M = 2, 4, 8, 16"
        join = f"join learners of a site until {MOST_LEARNERS} are left"
        yield f"{plan.at.learners} learners: {scores}; {join}"
    if plan.at.learners == 1:
        yield "1 learner: there is nothing to synchronise (mode=single)"
    for site in sites if len(sites) > 1 else ():
        binds = any(c.what.startswith(f"site {site.name} ") and not c.holds for c in plan.judged)
        share = site.tokens_s / whole
        if binds and share < SMALL_SHARE:
            yield f"site {site.name} binds and brings {share:.1%} of the tokens: leave it out"
