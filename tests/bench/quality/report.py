"""``docs/quality.md`` and its plots, from what is in the store."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .cells import BATCH, SEQ_LEN, Experiment
from .plots import plot
from .pool import clock
from .samples import pooled
from .store import Found
from .tables import Findings, gather, table
from .verdicts import verdicts

COMMAND = "python -m tests.bench.quality"
DEFAULTS = Path(__file__).parent / "defaults.md"
"""What follows for the defaults: written by hand, the only part of the page that is.

Its first line says, in an HTML comment, from which runs it was written.
"""
BY_HAND = "What follows for the defaults"
AT_A_TENTH = frozenset({"quantisation", "muon-formats", "deltas"})
"""Experiments that try another rate to judge formats there, not to choose one."""
STAMP = re.compile(r"<!-- written from runs (\S+) -->\n")


def write_report(
    page: Path,
    experiments: Sequence[Experiment],
    have: Mapping[str, Found],
    defaults: Path = DEFAULTS,
) -> None:
    """Write the page, beside it a folder of its name with plots and all results in one file."""
    folder = page.with_suffix("")
    found = [gather(experiment, have) for experiment in experiments]
    folder.mkdir(parents=True, exist_ok=True)
    written_from, by_hand = _read_defaults(defaults)
    parts = ["\n".join(_head(found)), *_warning(found, written_from), by_hand.strip()]
    for findings in found:
        pictures = plot(findings, folder)
        links = [os.path.relpath(path, page.parent) for path in pictures]
        parts.append("\n".join(_section(findings, links)).strip())
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (folder / "results.json").write_text(merged(found), encoding="utf-8")


def stamp_defaults(
    experiments: Sequence[Experiment], have: Mapping[str, Found], defaults: Path = DEFAULTS
) -> str:
    """Say in the first line of what is written by hand that it is of these runs; return which."""
    runs = runs_digest([gather(experiment, have) for experiment in experiments])
    _, by_hand = _read_defaults(defaults)
    defaults.write_text(f"<!-- written from runs {runs} -->\n{by_hand}", encoding="utf-8")
    return runs


def runs_digest(found: Sequence[Findings]) -> str:
    """Return what tells these runs and their losses from all others: 16 hexadecimal digits."""
    runs = {(run.scenario.digest, run.loss) for findings in found for run in findings.all()}
    return hashlib.blake2b(repr(sorted(runs)).encode(), digest_size=8).hexdigest()


def _read_defaults(defaults: Path) -> tuple[str, str]:
    """Return of which runs the section is that is written by hand, and the section."""
    text = defaults.read_text(encoding="utf-8")
    stamp = STAMP.match(text)
    return (stamp[1], text[stamp.end() :]) if stamp else ("", text)


def _warning(found: Sequence[Findings], written_from: str) -> Iterator[str]:
    """Say so unless the section written by hand was written from the runs of the tables."""
    if written_from != runs_digest(found):
        yield (
            "> **The next section was written from other runs than those in the tables below.** Its"
            " figures are typed by hand; where they differ from a table, the table is right."
        )


def merged(found: Sequence[Findings]) -> str:
    """Return all results as one JSON text, a line for each run, without their settings."""
    lines: list[str] = []
    for findings in found:
        for cell in findings.experiment.cells:
            for seed, run in sorted(findings.of(cell).items()):
                kept = {k: v for k, v in run.result.items() if k not in _LEFT_OUT}
                losses = [round(loss, 4) for loss in run.curve("loss")]
                row = {
                    "experiment": findings.experiment.name,
                    "cell": cell.key,
                    **kept,
                    "seed": seed,
                    "curve": list(zip(run.curve("tokens"), losses, strict=True)),
                }
                lines.append(json.dumps(row, separators=(",", ":")))
    return "[\n" + ",\n".join(lines) + "\n]\n"


_LEFT_OUT = {"name", "curve", "params_digests", "machine", "refused"}
"""``refused``: recorded runs are of two kinds. Older ones count second offers of initial parameters
too, (M - 1) P of them or some fewer, so that they cannot be told from what was refused.
"""


def _head(found: Sequence[Findings]) -> Iterator[str]:
    runs = {run.scenario.digest: run for findings in found for run in findings.all()}
    yield "# Learning quality"
    yield ""
    yield (
        "What training apart costs, measured in the lab (`skerry lab`): the real syncer, learners,"
        " codec and merge in one process on virtual time, so that a seed gives the same run each"
        " time. This page is generated, and each number comes from the runs that its table counts,"
        f" but for the section [{BY_HAND}](#{BY_HAND.lower().replace(' ', '-')}), which is typed by"
        " hand."
    )
    yield ""
    yield "```sh"
    yield f"{COMMAND} --report docs/quality.md      # everything that is missing, then this page"
    yield f"{COMMAND} quantisation --report docs/quality.md   # of one experiment"
    yield f"{COMMAND} --plan                        # what would be run, and how long it takes"
    yield "```"
    yield ""
    yield (
        "It can be stopped at any time and started again; finished runs (a line each of"
        " `tests/bench/quality/runs.jsonl.gz`, trial runs among them) are not made again."
    )
    yield ""
    yield from _limits(list(runs.values()), found)


def _limits(runs: Sequence[Found], found: Sequence[Findings]) -> Iterator[str]:
    yield "## Limits"
    yield ""
    if runs:
        sizes = sorted({int(run.number("parameters")) for run in runs})
        tokens = sum(run.number("trained_tokens") for run in runs)
        least, most = (int(f([run.number("tokens") for run in runs])) for f in (min, max))
        took = clock(sum(run.number("took_s") for run in runs))
        pythons = sorted({str(run.result["machine"]["python"]) for run in runs})
        devices = sorted({str(run.result["machine"]["device"]) for run in runs})
        yield (
            f"- {len(runs)} runs, {tokens / 1e6:.0f} M tokens trained in {took} of computing"
            f" ({', '.join(devices)})."
        )
        yield (
            f"- Models: transformers of {', '.join(f'{size / 1e3:.0f} k' for size in sizes)}"
            " parameters. What holds for them need not hold for a larger one."
        )
        yield (
            f"- A run merges {least / 1e6:.1f} to {most / 1e6:.1f} M tokens: learners of"
            f" {BATCH} sequences of {SEQ_LEN} bytes a step, unless a table says more. Larger M"
            " means fewer steps: at M = 8 a run has 21 rounds per fragment at H = 24."
        )
        yield (
            f"- Corpus: the sources of Python {', '.join(pythons)}'s standard library, as bytes;"
            " 2 % by content hash are held out, and 2,048 sequences of them are what a run is"
            " judged by."
        )
        yield from _by_sources(runs)
    yield (
        "- Intervals are 95 % of Student's t over seeds, of differences between runs of the same"
        " seed (initial parameters, order of the data). Two or three seeds give wide ones: a mean"
        " whose interval contains zero is no finding. They cover seeds only: another held-out text"
        " may say something else, and no interval here tells how much."
    )
    yield (
        "- Settings were chosen, and are judged, on the same held-out sequences and the same seeds:"
        " what looks best here was also chosen for how these came out."
    )
    yield from _by_other_text(found)
    spread = pooled(_differences(found))
    if spread is not None:
        yield (
            f"- A difference of one seed scatters by {spread[0]:.1f} % (the standard deviation that"
            f" {spread[1]} lines of several seeds have in common): below twice that it is no"
            " finding."
        )
    unlike = set[tuple[str, str]]().union(*(findings.unlike() for findings in found))
    if unlike:
        yield (
            f"- **{len(unlike)} pairs of runs are of different text** (trained on, or judged by):"
            " they are left out of all comparisons, not of the columns of losses."
        )
    missing = sum(findings.missing() for findings in found)
    if missing:
        names = ", ".join(f"{f.experiment.name} {f.missing()}" for f in found if f.missing())
        yield f"- **Not run yet: {missing} runs** ({names}). Their lines say `not run`."


def _by_other_text(found: Sequence[Findings]) -> Iterator[str]:
    """Say what it would cost to choose learning rates by text that judges few runs."""
    costs = [cost for f in found if f.experiment.name not in AT_A_TENTH for cost in f.choices()]
    if costs:
        yield (
            "- Chosen by the last evaluation on the way, which has 256 sequences,"
            f" {costs.count(0.0)} of {len(costs)} learning rates would be the same; with the others"
            " a run ends at most"
            f" {max(costs):.1f} % above the best."
        )


def _by_sources(runs: Sequence[Found]) -> Iterator[str]:
    """Say so if not all runs were made by the same sources."""
    made = Counter(run.sources for run in runs)
    if len(made) > 1:
        said = ", ".join(
            f"{f'`{digest}`' if digest else 'not recorded'} {count}"
            for digest, count in made.most_common()
        )
        yield (
            f"- The runs were made by {len(made)} states of the sources (runs of each: {said}),"
            " which are held to give equal results."
        )


def _differences(found: Sequence[Findings]) -> Iterator[Sequence[float]]:
    """Yield by how many per cent each line of several seeds differs, by seed; a pair of runs once.

    Not those of quantisation, made at rates that do not drift, nor lines that are the same run as
    what they are compared with. Runs of different settings that end with the same parameters are
    one run.
    """
    seen: set[tuple[str, str]] = set()
    for findings in found:
        if findings.experiment.name == "quantisation":
            continue
        for cell in findings.experiment.cells:
            more = findings.excesses(cell)
            ends = {
                (ours.ended_as, theirs.ended_as) for ours, theirs in findings.pairs(cell).values()
            }
            if len(more) > 1 and any(more) and not ends & seen:
                seen |= ends
                yield more


def _section(findings: Findings, pictures: Sequence[str]) -> Iterator[str]:
    experiment = findings.experiment
    yield f"## {experiment.title}"
    yield ""
    yield experiment.question
    yield ""
    yield f"`{COMMAND} {experiment.name}`"
    yield ""
    yield table(findings)
    yield ""
    said = verdicts(findings)
    if said:
        yield from (f"- {sentence}" for sentence in said)
        yield ""
    for cells in findings.same():
        names = [f"`{cell.said}`" for cell in cells]
        yield (
            f"{', '.join(names[:-1])} and {names[-1]} are the same runs: seed by seed they end with"
            " the same parameters, to the last bit."
        )
        yield ""
    if experiment.notes:
        yield experiment.notes
        yield ""
    yield from (f"![{experiment.title}]({picture})" for picture in pictures)
