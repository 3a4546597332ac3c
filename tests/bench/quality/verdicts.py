"""What the results say about goals and defaults, in sentences made from the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from .cells import Cell
from .samples import Estimate, slope
from .tables import Findings, effective_step


def verdicts(findings: Findings) -> list[str]:
    """Return what an experiment's results say; nothing where they are too few to say it."""
    name = findings.experiment.name
    special = {
        "batch": _batch,
        "modes": _modes,
        "quantisation": _quantisation,
        "muon-formats": _quantisation,
        "failures": _within_a_further,
        "speeds": _within_a_further,
        "muon-fleet": _within_a_further,
        "outer": _outer,
        "size": _size,
    }
    # Those two compare runs that are no pairs.
    told = name in special and (findings.alike() or name not in {"batch", "outer"})
    found = list(special[name](findings)) if told else []
    if special.get(name) in {_batch, _quantisation, _size}:
        return found
    return [*found, *_best(findings)]


def judged(difference: Estimate, goal: float) -> str:
    """Say whether a difference in per cent is at most ``goal``, as far as its interval tells."""
    if difference.half is None:
        word = "one seed only, no verdict"
    elif difference.high <= goal:
        word = "reached"
    elif difference.low > goal:
        word = "missed"
    elif difference.mean <= goal:
        word = "reached in the mean, the interval leaves it open"
    else:
        word = "missed in the mean, the interval leaves it open"
    return f"{difference.text(2, sign=True)} % (goal: at most {goal:g} %): {word}"


def _modes(findings: Findings) -> Iterator[str]:
    goals = {"2": 0.0, "4": 0.0, "8": 0.5}
    for cell in findings.experiment.cells:
        labels = dict(cell.labels)
        difference = findings.excess(cell)
        if labels["mode"] == "decoupled" and labels["M"] in goals and difference is not None:
            yield (
                f"Decoupled against data-parallel, {labels['model']} model, M = {labels['M']}: "
                f"{judged(difference, goals[labels['M']])}."
            )


def _batch(findings: Findings) -> Iterator[str]:
    """Compare the modes at each one's best rate, for every batch; say where it may lie beyond."""
    tried: dict[str, dict[str, dict[float, float]]] = {}
    for cell in findings.experiment.cells:
        labels, loss = dict(cell.labels), findings.loss(cell.key)
        if loss is not None:
            modes = tried.setdefault(labels["batch"], {})
            modes.setdefault(labels["mode"], {})[float(labels["lr"])] = loss.mean
    for size, modes in tried.items():
        reference = modes.pop("data-parallel", None)
        if reference is not None and modes:
            base = min(reference.values())
            said = ", ".join(
                f"{mode} {100 * (min(rates.values()) / base - 1):+.1f} % {_rate(rates)}"
                for mode, rates in modes.items()
            )
            yield (
                f"Batch {size}, each at the best rate that was tried, against data-parallel"
                f" {_rate(reference)}: {said}."
            )


def _rate(tried: Mapping[float, float]) -> str:
    """Name the best of several rates, and say if it is the first or the last that was tried."""
    best = min(tried, key=lambda rate: tried[rate])
    edges = {min(tried): ", the lowest", max(tried): ", the highest"}
    edge = ", the only one" if len(tried) == 1 else edges.get(best, "")
    return f"(at {best:g}{edge})"


def _quantisation(findings: Findings) -> Iterator[str]:
    """Judge distances: where steps are too short, longer ones are better, and still an error."""
    for cell in findings.experiment.cells:
        labels = dict(cell.labels)
        difference = findings.excess(cell)
        if difference is not None:
            off = Estimate(abs(difference.mean), difference.half, difference.n)
            yield (
                f"Contributions {labels['contribution']}, global {labels['global']}, lr"
                f" {labels['lr']}: off by {judged(off, 0.1)}."
            )


def _within_a_further(findings: Findings) -> Iterator[str]:
    default = {
        "failures": ("inner", "warm", 0.3),
        "speeds": ("quorum", "K = 1 + grace", 0.3),
        "muon-fleet": ("learners", "all from the start", 0.5),
    }
    name, value, goal = default[findings.experiment.name]
    for cell in findings.experiment.cells:
        labels = dict(cell.labels)
        difference = findings.excess_at_equal_steps(cell)
        beside = not cell.plotted or labels.get("speeds") == "4x"  # no goal is about these
        if labels[name] != value or difference is None or beside:
            continue
        said = ", ".join(f"{key} {text}" for key, text in cell.labels)
        yield f"By the defaults ({said}), at equal steps: {judged(difference, goal)}."


def _size(findings: Findings) -> Iterator[str]:
    """Say how the gap to data-parallel changes with the model's size, for each M.

    Of each size by the line that is best at its first seed: others have fewer.
    """
    best: dict[int, dict[str, tuple[float, Cell]]] = {}
    for cell in findings.experiment.cells:
        loss, model = findings.losses(cell.key).get(min(cell.seeds)), dict(cell.labels)["model"]
        if loss is not None and findings.excesses(cell):
            sizes = best.setdefault(cell.learners, {})
            sizes[model] = min(sizes.get(model, (loss, cell)), (loss, cell), key=itemgetter(0))
    for m, sizes in sorted(best.items()):
        points = [
            (math.log2(next(iter(findings.of(cell).values())).number("parameters")), more)
            for _, cell in sizes.values()
            for more in findings.excesses(cell)
        ]
        if (found := slope(points)) is not None:
            yield (
                f"M = {m}: each doubling of the parameters changes the gap by"
                f" {found.text(2, sign=True)} points of a per cent ({found.n} pairs of runs):"
                f" {'it does not grow' if found.high <= 0 else 'the interval leaves growth open'}."
            )


def _outer(findings: Findings) -> Iterator[str]:
    """Say how much of the order of losses the effective step explains, at each H and M."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for cell in findings.experiment.cells:
        labels = dict(cell.labels)
        for found in findings.of(cell).values():
            step = effective_step(found)
            if step is not None:
                groups.setdefault((labels["H"], labels["M"]), []).append((step, found.loss))
    for (h, m), points in groups.items():
        if len({step for step, _ in points}) > 2:
            best = min(points, key=lambda point: point[1])
            yield (
                f"H = {h}, M = {m}: the best single run has an effective step of {best[0]:.2f};"
                f" steps from {min(points)[0]:.2f} to {max(points)[0]:.2f} were tried."
            )


def _best(findings: Findings) -> Iterator[str]:
    """Name the best cell among those that are compared with the same one, seed by seed.

    Its interval is as wide as the lowest of so many needs. The ladder is not among them: it is
    there for its numbers of steps.
    """
    named = {cell.key: cell for cell in findings.experiment.cells}
    groups: dict[str, list[tuple[Cell, Estimate]]] = {}
    for cell in findings.experiment.cells:
        difference = findings.difference(cell)
        beside = findings.experiment.at_equal_steps and not cell.plotted
        if difference is not None and not beside and cell.key not in findings.experiment.ladder:
            groups.setdefault(cell.against, []).append((cell, difference))
    for baseline, compared in groups.items():
        base = f"`{named[baseline].said}`"
        if findings.experiment.at_equal_steps:
            base = "equal fleets of as many steps"
        yield _best_of(compared, base)


def _best_of(compared: Sequence[tuple[Cell, Estimate]], base: str) -> str:
    best, alone = min(compared, key=lambda pair: pair[1].mean)
    k = len(compared)
    difference = alone.among(k)
    if difference.mean >= 0:
        none = f"None of the {k} lines" if k > 1 else "The line"
        return f"{none} compared with {base} is{'' if k > 1 else ' not'} better in the mean."
    chance = ", of one seed" if difference.half is None else ", which may be chance"
    sure = "" if difference.high < 0 else chance
    which = (
        f"Best in the mean of the {k} lines compared with" if k > 1 else "Better in the mean than"
    )
    wider = "" if difference == alone else f" (as wide as the best of {k} needs)"
    more = f"{difference.text(2, sign=True)} %{wider}{sure}"
    return f"{which} {base}: `{best.said}`, {more}."
