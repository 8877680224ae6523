"""What arrives at a simulated scheduler: a file of requests, or random ones."""

import math
import random
from dataclasses import dataclass
from pathlib import Path

from segattn.reference.json_files import FormatError, parse_object, read_text, typed

MOST_TOKENS = 1 << 20
"""Of one request of a workload file."""


@dataclass(frozen=True)
class Arrival:
    """A request of the workload."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def synthetic(count: int, per_second: float, seed: int) -> list[Arrival]:
    """Arrivals at random times; prompts of 800 tokens and outputs of 120 in the median."""
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(per_second)
        prompt = min(6000, max(16, round(rng.lognormvariate(math.log(800), 0.9))))
        output = min(1500, max(2, round(rng.lognormvariate(math.log(120), 0.7))))
        arrivals.append(Arrival(now, prompt, output))
    return arrivals


def read_workload(path: Path) -> list[Arrival]:
    """The workload of a file of JSON lines, in order of arrival. FormatError for a bad line."""
    arrivals = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        place = f"{path}:{number}"
        arrival = typed(Arrival, parse_object(line, place), place)
        for name in ("prompt_tokens", "output_tokens"):
            if not 1 <= getattr(arrival, name) <= MOST_TOKENS:
                value = getattr(arrival, name)
                raise FormatError(f"{place}: {name}={value}: must be within 1..{MOST_TOKENS}")
        arrivals.append(arrival)
    if not arrivals:
        raise FormatError(f"{path}: holds no request")
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)
