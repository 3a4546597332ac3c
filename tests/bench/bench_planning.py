"""How long a month of 2.4 million chips takes to simulate, and the answer with all its figures.

``python tests/bench/bench_planning.py``: CPU seconds, the least of some rounds, imports left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from harness import Goal, parser, write

from skerry_tools.plan.simulation import simulate
from skerry_tools.plan.simulation_answer import answer, setup_of

MONTH_GOAL_S = 1.0
ANSWER_GOAL_S = 5.0
ROUNDS = 5


def least_s(work: Callable[[], object]) -> float:
    """Return the least CPU time that it took, in seconds."""
    times: list[float] = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    given = parser(__doc__ or "").parse_args()
    asked = setup_of(None, [])
    month_s = least_s(lambda: simulate(asked))
    found, tables = simulate(asked), asked.question.tables
    answer_s = least_s(lambda: answer(simulate(asked)).json())
    print(
        f"planning: {tables.fleet.chips:,.0f} chips, {tables.simulation.days:g} days,"
        f" {found.failures:,} failures: {month_s:.2f} s; the default answer: {answer_s:.2f} s"
    )
    goals = [
        Goal("planning: 2.4M chips, 30 days", MONTH_GOAL_S, month_s, "s", at_most=True),
        Goal("planning: the default answer", ANSWER_GOAL_S, answer_s, "s", at_most=True),
    ]
    write("planning", [{"month_s": month_s, "answer_s": answer_s}], goals, given.json)


if __name__ == "__main__":
    main()
