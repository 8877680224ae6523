"""Random work: small configurations that meet every bound, requests that collide a lot.

An event is a JSON value: ["add", request], ["abort", ids], ["reset", running], ["pause", state],
["schedule"], ["deliver", tokens]. The tokens of a delivery go to the requests that sample, in turn.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from ...reference.paging import num_blocks_for

Event = list[Any]

TOKENS = (5, 6)
EOS = 2


def random_config(random: Random, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of SchedulerConfig; those of `fixed` are as given."""
    length = fixed.get("max_model_len", random.randint(3, 24))
    seqs = fixed.get("max_num_seqs", random.randint(1, 4))
    block_size = fixed.get("block_size", random.randint(1, 5))
    whole = num_blocks_for(length, block_size)
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": random.randint(seqs, seqs + 12),
        "max_model_len": length,
        "block_size": block_size,
        "num_blocks": random.randint(1 + whole, 1 + 3 * whole),
        "enable_prefix_caching": random.random() < 0.7,
        **fixed,
    }


def random_events(random: Random, config: Mapping[str, Any], count: int) -> list[Event]:
    """Work for one scheduler; what is left at its end is served by the run."""
    events: list[Event] = []
    added = 0
    for _ in range(count):
        draw = random.random()
        if draw < 0.25 or not added:
            for _ in range(random.randint(1, 3)):
                # Now and then the id of an earlier request, which may be gone by then.
                name = added if random.random() > 0.1 or not added else random.randrange(added)
                events.append(["add", _request(random, config, f"r{name}")])
                added = max(added, name + 1)
        elif draw < 0.3:
            events.append(["abort", [f"r{random.randrange(added)}" for _ in range(2)]])
        elif draw < 0.36:
            events.append(["reset", random.random() < 0.5])
        elif draw < 0.39:
            events.append(["pause", random.choice([0, 1, 2])])
        elif draw < 0.7:
            events.append(["schedule"])
        else:
            values = (*TOKENS, *TOKENS, *TOKENS, EOS)
            events.append(["deliver", [random.choice(values) for _ in range(4)]])
    return events


def _request(random: Random, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    text = random.choice([TOKENS[:1], TOKENS[:1], TOKENS])
    length = random.randint(1, config["max_model_len"] - 1)
    return {
        "id": name,
        "prompt": [text[i % len(text)] for i in range(length)],
        "max_tokens": random.randint(1, config["max_model_len"] - length),
        "salt": random.choice([None, None, None, "x"]),
    }
