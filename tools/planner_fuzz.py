"""The planner on random schedules: every dependency is ordered, and without any one wait some dependency is not.

    tools/fuzz --planner -n 10000 --seed 1

The schedules, and the independent reading of a plan by reachability, are those of test/inductor/plan_closure.py;
hypothesis draws the schedules, and shrinks one that fails.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test" / "inductor"))


def run(count: int, seed: int) -> int:
    import plan_closure as planner  # pyrefly: ignore[missing-import]
    from hypothesis import given, HealthCheck, Phase, seed as seeded, settings

    from worker_pool import Progress

    progress, waits, start = Progress(count, "schedules"), 0, time.monotonic()

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(planner.schedules())
    def check(schedule: object) -> None:
        nonlocal waits
        waits += planner.check_schedule(schedule)
        if progress.done < count:
            progress.step()

    try:
        check()
    except AssertionError as error:
        print(f"\nafter {progress.done} schedules:\n{error}")
        return 1
    spent = time.monotonic() - start
    print(f"{progress.done} schedules, {waits} waits, {spent:.0f} s: all ordered, none with a wait too many")
    return 0
