"""Command line of the lab: parse first, import what is heavy afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skerry.service.entry import Sets, answer, application

app = application()

File = Annotated[
    Path | None,
    typer.Argument(help="Run settings, and tables of the lab.", metavar="SCENARIO.toml"),
]


@app.command()
def run(
    scenario: File = None,
    *,
    set_: Sets = None,
    learners: Annotated[
        int | None, typer.Option(help="Number of equal islands.", min=1, metavar="N")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of parameters, data and failures.", metavar="S")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a whole cluster in this process, on virtual time; equal scenarios give equal results.

    The services' own code does the work, over a log in memory: no broker is needed. By default a
    model of 117 000 parameters is trained for 500 steps. A scenario may also set [[islands]] name,
    step_s, jitter, joins, leaves, hostile; [link] latency_s, up_bytes_s, down_bytes_s; [failures]
    islands, every_s, down_s, warm, save_every_s; [judging] points, batches, final_batches, batch;
    rho.
    """
    from skerry.service import interrupts
    from skerry.service.entry import exit_on_error
    from skerry.service.reporting import configure

    with exit_on_error(cleans_up=False):
        from skerry_tools.lab.scenario import load

        wanted = load(scenario, set_ or [], learners=learners, seed=seed)
        configure("error", service="lab")
        from skerry_tools.lab.show import run_lab

        interrupts.raise_again()
        run_lab(wanted, as_json=json)


def main() -> None:
    answer(app, "lab")


if __name__ == "__main__":
    main()
