"""One of four learners hostile, in the lab: ``python tests/bench/bench_hostile.py``.

Each row is a run of the small reference model; the loss is held out, and compared with that of a
run of the other three learners. ``none`` is an honest run, beside one without the rules. All runs
are virtual: the figures depend on the machine's arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from harness import Goal, parser, write

from skerry.protocol.messages import Commit, Quarantine, RefusalCause
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects
from skerry.service.reporting import configure
from skerry.settings.models import ContainConfig
from skerry_tools.lab.hostile import Attack
from skerry_tools.lab.lab import RUN, Lab
from skerry_tools.lab.scenario import IslandSettings, Judging, LabScenario, load

HOSTILE = "learner-3"
CONTAINED, HONEST = 1.0, 0.1
"""Goals in per cent: above the loss of the other three; an honest run's with and without rules."""
OFF = ContainConfig(clip=0, share=0, steps=0, repeats=False, opposed=False, quarantine=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One run; ``quarantine`` is why the hostile learner was put there, after so many versions."""

    attack: str
    rules: str
    loss: float
    merged: int
    refused: int
    cut: float
    quarantine: str


def measure(attack: Attack | None, learners: int, steps: int, rules: ContainConfig | None) -> Row:
    """Run a scenario; without ``rules`` the default ones hold."""
    names = [f"learner-{number}" for number in range(learners)]
    run = load(None, [f"train.steps={steps}", f"sync.learners={learners}"], environ={}).run
    scenario = LabScenario(
        name=str(attack),
        run=run if rules is None else run.model_copy(update={"contain": rules}),
        islands=tuple(
            IslandSettings(name=name, hostile=attack if name == HOSTILE else None) for name in names
        ),
        judging=Judging(points=1),
    )
    lab = Lab(scenario)
    loss = lab.run().loss
    merged, refused, cuts, why = 0, 0, list[float](), ""
    for record in lab.broker.streams[Subjects(RUN).stream("LEDGER")].records.values():
        if ".commit." in record.subject:
            commit = decode(Commit, record.payload, run=RUN)
            own = [c for c in commit.consumed if c.learner == HOSTILE and commit.version > 1]
            merged, cuts = merged + len(own), [*cuts, *(c.cut for c in own)]
            refused += sum(
                r.learner == HOSTILE and r.cause is not RefusalCause.GENESIS for r in commit.refused
            )
        elif ".quarantine." in record.subject:
            decided = decode(Quarantine, record.payload, run=RUN)
            why = f"{decided.learner}: {decided.reason.value}"
    named = "default" if rules is None else "off" if rules == OFF else "some"
    kind = attack.value if attack else "none" if learners == 4 else "three learners"
    return Row(kind, named, loss, merged, refused, sum(cuts) / max(1, len(cuts)), why)


def table(rows: Sequence[Row], three: float, honest: float) -> str:
    """Return the rows as Markdown."""
    heads = "learner-3 sends", "rules", "held-out loss", "to the other three", "merged, refused"
    lines = [f"| {' | '.join((*heads, 'cut', 'quarantine'))} |", f"|{'---|' * 7}"]
    for row in rows:
        base = honest if row.attack == "none" else three
        against = f"{row.loss / base - 1:+.2%}" + (" of honest" if row.attack == "none" else "")
        counts = f"{row.merged}, {row.refused}"
        cells = row.attack, row.rules, f"{row.loss:.4f}", against, counts, f"{row.cut:.2f}"
        lines.append(f"| {' | '.join(cells)} | {row.quarantine or '-'} |")
    return "\n".join(lines)


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("--steps", type=int, default=192)
    args.add_argument("--off", action="store_true", help="also run each attack without the rules")
    given = args.parse_args()
    configure("error", service="bench")
    steps: int = given.steps
    three = measure(None, 3, steps, None)
    bare, honest = measure(None, 4, steps, OFF), measure(None, 4, steps, None)
    rows = [three, bare, honest]
    for rules in (None, OFF) if given.off else (None,):
        rows += [measure(attack, 4, steps, rules) for attack in Attack]
    print(table(rows, three.loss, bare.loss))
    held = [row for row in rows if row.rules == "default" and row.attack in set(Attack)]
    worst = max(row.loss / three.loss - 1 for row in held)
    cost = abs(honest.loss / bare.loss - 1)
    goals = [
        Goal(
            "hostile: one of four", CONTAINED, 100 * worst, "% above the other three", at_most=True
        ),
        Goal("hostile: none", HONEST, 100 * cost, "% by the rules", at_most=True),
    ]
    write("hostile", [asdict(row) for row in rows], goals, given.json)


if __name__ == "__main__":
    main()
