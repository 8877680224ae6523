"""What `additional_config` tells the plugin, and what of it cannot be meant."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from ..reference.paging import check_buckets, default_buckets
from .policy import NeuronPolicy


@dataclass(frozen=True)
class NeuronOptions:
    """The part of `neuron_config` that the plugin reads; None stands for the default buckets."""

    num_batched_tokens_buckets: Sequence[int] | None = None
    num_seqs_buckets: Sequence[int] | None = None
    neuron_policy: NeuronPolicy = field(default_factory=NeuronPolicy)

    @classmethod
    def read(cls, additional_config: object) -> "NeuronOptions":
        """ValueError for a key that looks like a misspelt one of these, and for a bad policy.

        Other keys of `neuron_config` belong to other owners.
        """
        given = additional_config if isinstance(additional_config, dict) else {}
        options: dict[str, Any] = given.get("neuron_config", {})
        names = _names(cls)
        for key in options:
            if key not in names and get_close_matches(key, names, n=1, cutoff=0.75):
                raise ValueError(f"neuron_config: {key!r} is unknown, must be one of {names}")
        ours = {name: options[name] for name in names if options.get(name) is not None}
        policy: Mapping[str, Any] = ours.pop("neuron_policy", {})
        unknown = [key for key in policy if key not in _names(NeuronPolicy)]
        if unknown:
            raise ValueError(
                f"neuron_config.neuron_policy: {unknown[0]!r} is unknown, "
                f"must be one of {_names(NeuronPolicy)}"
            )
        return cls(**ours, neuron_policy=NeuronPolicy(**policy))

    def prefill_buckets(self, largest_chunk: int) -> list[int]:
        """Padded token counts of a prefill, the last one `largest_chunk`."""
        given = self.num_batched_tokens_buckets
        if given is None:
            return default_buckets(largest_chunk)
        return check_buckets("num_batched_tokens_buckets", given, largest_chunk)

    def decode_buckets(self, max_num_seqs: int) -> list[int]:
        """Padded batches of a decode, the last one `max_num_seqs`."""
        given = self.num_seqs_buckets
        if given is None:
            return default_buckets(max_num_seqs, smallest=1)
        return check_buckets("num_seqs_buckets", given, max_num_seqs)


def _names(kind: Any) -> list[str]:
    every: Iterable[Any] = fields(kind)
    return [one.name for one in every]
