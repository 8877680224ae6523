"""Every shape that a configuration can reach, so that each is compiled before the first request.

A Neuron graph has fixed shapes. The list follows from the configuration alone:

* prefill: a chunk at the start of a request, padded to a bucket of `prefill_buckets`;
* segmented_prefill: a chunk behind cached tokens, after an earlier chunk or a prefix-cache hit;
* decode: one token of each request and room for its drafts, a bucket of `decode_buckets` by a
  bucket of context lengths. Steps without drafts run the same graphs: fewer of them to load.

With K the largest number of known tokens of a request, `min(max_model_len - 1, rows of the usable
blocks)`, and c the largest chunk, a first chunk has 1..min(c, K) tokens and a later one
1..min(c, K - p), p being the smallest prior: of one block when the prefix cache is on, of the
shortest chunk when prompts are computed in chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..reference.paging import (
    attention_rows,
    check_buckets,
    num_blocks_for,
    smallest_bucket,
)
from ..scheduler import SchedulerConfig

GraphKind = Literal["prefill", "segmented_prefill", "decode"]


@dataclass(frozen=True, order=True)
class GraphShape:
    """Shape of one compiled graph."""

    kind: GraphKind
    bucket: int
    """Padded tokens of a prefill, padded requests of a decode."""
    rows: int
    """Rows of the token tensors: `attention_rows(bucket)`, or `bucket * num_queries`."""
    num_blocks: int
    """Entries of a request's block table."""
    num_queries: int = 1
    """Tokens per request of a decode: 1 + drafts."""

    @property
    def name(self) -> str:
        """Such as prefill_s1024; decode_b4_t3_w128 has 3 tokens and 128 blocks per request."""
        if self.kind != "decode":
            return f"{self.kind}_s{self.bucket}"
        queries = f"_t{self.num_queries}" if self.num_queries > 1 else ""
        return f"decode_b{self.bucket}{queries}_w{self.num_blocks}"


class CompilePlan:
    """The shapes of one configuration, and the choice among them."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        decode_context_length_buckets: Sequence[int] = (),
    ) -> None:
        """Derive the shapes.

        `decode_context_length_buckets` are context lengths in tokens, ascending and below
        max_model_len, which is always one of them, as in vLLM Neuron. ValueError for other lists.
        """
        self._config = config
        self._num_queries = 1 + config.num_speculative_tokens
        self._context_buckets = check_buckets(
            "decode_context_length_buckets with max_model_len",
            [*decode_context_length_buckets, config.max_model_len],
            config.max_model_len,
        )
        self.shapes = tuple(self._shapes())
        """Every reachable shape, in the order of warm-up."""
        self._members = frozenset(self.shapes)

    def prefill(self, bucket: int, prior_tokens: int) -> GraphShape:
        """Shape for a chunk padded to `bucket`. RuntimeError when the plan does not hold it."""
        kind: GraphKind = "segmented_prefill" if prior_tokens else "prefill"
        return self._member(self._prefill_shape(kind, bucket))

    def decode(self, num_seqs: int, max_context_len: int) -> GraphShape:
        """Shape for a batch of `num_seqs`. RuntimeError when the plan does not hold it."""
        bucket = smallest_bucket(num_seqs, self._config.decode_buckets)
        context = smallest_bucket(max_context_len, self._context_buckets)
        return self._member(self._decode_shape(bucket, context))

    def _member(self, shape: GraphShape) -> GraphShape:
        if shape not in self._members:
            raise RuntimeError(f"{shape} is not in the compile plan of {len(self.shapes)} shapes")
        return shape

    def _prefill_shape(self, kind: GraphKind, bucket: int) -> GraphShape:
        width = num_blocks_for(self._config.max_model_len, self._config.block_size)
        return GraphShape(kind, bucket, attention_rows(bucket), width)

    def _decode_shape(self, bucket: int, context: int) -> GraphShape:
        width = num_blocks_for(context, self._config.block_size)
        queries = self._num_queries
        return GraphShape("decode", bucket, bucket * queries, width, queries)

    def _shapes(self) -> Iterator[GraphShape]:
        config = self._config
        usable_rows = (config.num_blocks - 1) * config.block_size
        most_known = min(config.max_model_len - 1, usable_rows)
        # The threshold cuts the prompts of requests that are not alone, and only those.
        chunk = config.step_token_budget
        shortest = min(chunk, config.long_prefill_token_threshold or chunk)
        for bucket in _reachable(config.prefill_buckets, 1, min(chunk, most_known)):
            yield self._prefill_shape("prefill", bucket)
        priors = [config.block_size] if config.enable_prefix_caching else []
        if config.enable_chunked_prefill:
            priors.append(shortest)
        smallest_prior = min(priors, default=most_known)
        for bucket in _reachable(
            config.prefill_buckets, 1, min(chunk, most_known - smallest_prior)
        ):
            yield self._prefill_shape("segmented_prefill", bucket)
        # A request that decodes owns a block at least: the one that its next token lies in.
        num_usable = config.num_blocks - 1
        most_seqs = min(config.max_num_seqs, config.step_token_budget, num_usable)
        fewest_seqs = 1
        for bucket in _reachable(config.decode_buckets, 1, most_seqs):
            longest = min(most_known, (num_usable - fewest_seqs + 1) * config.block_size)
            # The shortest request that decodes knows two tokens.
            for context in _reachable(self._context_buckets, 2, longest):
                yield self._decode_shape(bucket, context)
            fewest_seqs = bucket + 1


def _reachable(buckets: Sequence[int], smallest: int, largest: int) -> list[int]:
    """The buckets that sizes smallest..largest fall into."""
    if smallest > largest:
        return []
    first, last = smallest_bucket(smallest, buckets), smallest_bucket(largest, buckets)
    return [bucket for bucket in buckets if first <= bucket <= last]
