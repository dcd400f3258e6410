"""Contestants in turns, so that a busy neighbour is fair to all of them: CPU and wall time."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Contestants = Mapping[str, Callable[[], Any]]
WARM = 2
"""Rounds before those that count."""


@dataclass
class Times:
    """Seconds of one contestant in every round, and the threads that it had.

    With one thread on a CPU, the time is that of the CPU, which other processes disturb little;
    else it is that of the clock on the wall.
    """

    threads: int = 1
    device: str = "cpu"
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    _started: tuple[float, float] = (0.0, 0.0)

    @property
    def clock(self) -> str:
        return "cpu" if self.threads == 1 and self.device == "cpu" else "wall"

    @property
    def rounds(self) -> list[float]:
        return self.cpu if self.clock == "cpu" else self.wall

    @property
    def seconds(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.rounds)

    def add(self, function: Callable[[], Any]) -> Any:
        """Time one call, and return what it returned."""
        self.start()
        result = function()
        self.stop()
        return result

    def start(self) -> None:
        synchronise(self.device)
        self._started = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        synchronise(self.device)
        wall, cpu = self._started
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)

    def after(self, warm: int) -> "Times":
        """Without the first rounds."""
        return Times(self.threads, self.device, self.wall[warm:], self.cpu[warm:])

    def longest(self, count: int) -> "Times":
        """Those rounds that took longest, for what works only now and then."""
        cut = slice(-max(1, count), None)
        return Times(self.threads, self.device, sorted(self.wall)[cut], sorted(self.cpu)[cut])


def taking_turns(
    contestants: Contestants, rounds: int, device: str = "cpu", warm: int = WARM
) -> dict[str, Times]:
    """Times of all contestants, which run once in every round.

    Where torch has several threads, every contestant has as many of them as it is fastest with.
    """
    most = torch.get_num_threads()
    counts = {name: fastest_threads(call, most, device) for name, call in contestants.items()}
    found = {name: Times(counts[name], device) for name in contestants}
    for k in range(rounds + warm):
        for name, call in contestants.items():
            torch.set_num_threads(counts[name])
            (found[name] if k >= warm else Times(device=device)).add(call)
    torch.set_num_threads(most)
    return found


def fastest_threads(call: Callable[[], Any], most: int, device: str = "cpu") -> int:
    """One thread or all of them, by the best of three calls each."""
    if most == 1 or device != "cpu":
        return most
    best = {}
    for count in (1, most):
        torch.set_num_threads(count)
        times = Times(most)
        for _ in range(3):
            times.add(call)
        best[count] = min(times.wall)
    torch.set_num_threads(most)
    return min(best, key=best.__getitem__)


def timed(call: Callable[[], Any], device: str = "cpu") -> tuple[Times, Any]:
    """Times of a single call, as it comes, and what it returned."""
    times = Times(torch.get_num_threads(), device)
    return times, times.add(call)


def stepper(loss: Any, parameters: Any, optimizer: Any) -> Callable[..., None]:
    """A step of training on a batch; ``optimizer`` makes one of parameters."""
    made = optimizer(parameters)

    def step(*batch: Any) -> None:
        made.zero_grad()
        loss(*batch).backward()
        made.step()

    return step


def present(makers: Mapping[str, Callable[..., Any]], *args: Any) -> dict[str, Any]:
    """What functions make, but for those whose package is not installed, which are named."""
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make(*args)
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return made


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
