"""``skerry lab``: what its command line does."""

from __future__ import annotations

import json

from rich.console import Console

from skerry_tools.lab.lab import Lab
from skerry_tools.lab.scenario import LabScenario
from skerry_tools.lab.show import Display, table


def run_lab(scenario: LabScenario, *, as_json: bool) -> None:
    """Run a scenario, show how it goes on stderr, and print what came of it."""
    with Display(Console(stderr=True)) as display:
        result = Lab(scenario, display.report, watch=display.watch).run()
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        Console().print(table(result, len(scenario.fleet)))
