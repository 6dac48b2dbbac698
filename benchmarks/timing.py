"""Clocks: calls timed in turn, so that a ratio is between neighbors in time; and what was compiled when, by stage."""

from collections import Counter
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import jax

BACKEND = "/jax/core/compile/backend_compile_duration"  # XLA alone; of a program found in the cache, its retrieval


class Spent(NamedTuple):
    """Seconds of one call: on the wall, and of this process's CPUs, all threads together."""

    wall: float
    cpu: float


def timed(call: Callable) -> Spent:
    """`call` must block until its work is done."""
    wall, cpu = perf_counter(), process_time()
    call()
    return Spent(perf_counter() - wall, process_time() - cpu)


def interleave(calls: dict, rounds: int, timed: Callable = timed) -> dict[str, list[Spent]]:
    """A B A B ...: every call once to warm up, then once a round. Load that comes and goes hits all alike."""
    for call in calls.values():
        timed(call)
    spent = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            spent[name].append(timed(call))
    return spent


def middle(spent: list[Spent]) -> Spent:
    """The median of each clock."""
    return Spent(*map(median, zip(*spent, strict=True)))


def ratio(a: list[Spent], b: list[Spent]) -> Spent:
    """The median over rounds of a / b."""
    return middle([Spent(x.wall / y.wall, x.cpu / y.cpu) for x, y in zip(a, b, strict=True)])


class Compiles:
    """Programs that XLA compiled from now on and the seconds that took, by what `stage` was when it did."""

    def __init__(self, stage: str = ""):
        self.stage, self.seconds, self.programs = stage, Counter(), Counter()
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event: str, seconds: float, **_) -> None:
        if event == BACKEND:
            self.seconds[self.stage] += seconds
            self.programs[self.stage] += 1
