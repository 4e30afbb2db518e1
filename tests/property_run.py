"""Many random layers or programs, for a number or a time: what ran, how much of it fused, and the smallest failures.

    python tests/property_run.py layers --examples 10000 --seed 1
Where the tests stop at the first failure and shrink it, this goes on and keeps the shortest layer of each kind.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption
from test_random_layers import GRAPHS as LAYER_GRAPHS
from test_random_layers import compare_layer
from test_random_programs import GRAPHS as PROGRAM_GRAPHS
from test_random_programs import compare_program

from pyg_fullgraph import debug

CHECKS: dict[str, tuple[Callable, tuple]] = {"layers": (compare_layer, LAYER_GRAPHS),
                                             "programs": (compare_program, PROGRAM_GRAPHS)}


class Tally:
    """What happened so far."""

    def __init__(self) -> None:
        self.examples = self.skipped = 0
        self.phases: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: dict[str, list[str]] = {}

    def count(self, check: Callable, case: object, data: st.DataObject, device: str) -> None:
        texts: list[str] = []
        debug.reset()
        try:
            check(case, data, texts.append, device)
            self.examples += 1
        except UnsatisfiedAssumption:
            self.skipped += 1
        except Exception as error:
            self.examples += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__} at {last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            self.failures.setdefault(what, []).append(f"{''.join(texts)}\n{type(error).__name__}: {error}")
        self.phases.update(debug.counters())
        for found in debug.plain_reasons().values():
            self.reasons.update(found)

    def report(self) -> None:
        print(f"{self.examples} examples, {self.skipped} without a finite answer, "
              f"{sum(map(len, self.failures.values()))} failures; "
              f"edge phases: {self.phases['fused']} fused, {self.phases['plain']} plain")
        for reason, count in self.reasons.most_common():
            print(f"  plain {count:5d}  {reason}")
        for what, found in self.failures.items():
            print(f"\n--- {len(found)} x {what}\n{min(found, key=len)}")


def main(
    kind: Annotated[str, typer.Argument(help="layers or programs")],
    examples: Annotated[int, typer.Option(help="At most.")] = 10_000,
    minutes: Annotated[float, typer.Option(help="At most.")] = 1e9,
    start: Annotated[int, typer.Option("--seed", help="Of what is drawn.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", debug.PlainPathWarning)
    check, graphs = CHECKS[kind]
    tally, end = Tally(), time.monotonic() + 60 * minutes
    while tally.examples < examples and time.monotonic() < end:
        size = min(100, examples - tally.examples)

        @seed(start)
        @settings(max_examples=size, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))
        @given(case=st.sampled_from(graphs), data=st.data())
        def run(case: object, data: st.DataObject) -> None:
            tally.count(check, case, data, device)

        run()
        start += 1
    tally.report()
    raise typer.Exit(bool(tally.failures))


if __name__ == "__main__":
    typer.run(main)
