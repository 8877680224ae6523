"""Forward pass without cache, padding or kernels: the independent answer that --check compares."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .llama import Array, Float32Array, Llama


def dense_causal_attention(layer: int, q: Array, k: Array, v: Array) -> Array:
    """Causal attention of q [Hq, S, d] over k, v [Hkv, S, d]; float32 inside, q's dtype out."""
    group = len(q) // len(k)
    num_tokens, head_dim = q.shape[1:]
    unseen = ~np.tri(num_tokens, dtype=np.bool_)
    mixed = np.empty(q.shape, np.float32)
    # Head by head: all scores of a long text at once would not fit in memory.
    for head, rows in enumerate(q.astype(np.float32)):
        keys, values = (x[head // group].astype(np.float32) for x in (k, v))
        scores = rows @ keys.T / np.float32(np.sqrt(head_dim))
        scores[unseen] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed[head] = weights / weights.sum(axis=-1, keepdims=True) @ values
    return mixed.astype(q.dtype)


def plain_logits(model: Llama, token_ids: Sequence[int], first: int = 0) -> Float32Array:
    """Logits [len(token_ids) - first, vocab] of the tokens from index `first` on."""
    ids = np.asarray(token_ids, dtype=np.int32)
    positions = np.arange(len(ids), dtype=np.int32)
    return model.logits(model.forward(ids, positions, dense_causal_attention)[first:])


@dataclass(frozen=True)
class Comparison:
    """How the served logits of some sampled tokens differ from the plain forward pass."""

    num_tokens: int
    max_logit_difference: float
    min_top2_margin: float
    tokens_agree: bool

    def __or__(self, other: "Comparison") -> "Comparison":
        """Comparison of the tokens of both."""
        return Comparison(
            self.num_tokens + other.num_tokens,
            max(self.max_logit_difference, other.max_logit_difference),
            min(self.min_top2_margin, other.min_top2_margin),
            self.tokens_agree and other.tokens_agree,
        )


NOTHING_COMPARED = Comparison(0, 0.0, float("inf"), True)


def compare_with_plain(
    model: Llama,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    served_logits: Sequence[Float32Array],
) -> Comparison:
    """Compare one request's `served_logits` ([vocab] per output token) with the plain pass.

    The plain pass reads the served tokens, so that one early difference does not hide the rest;
    if all its greedy choices agree, its own greedy continuation is the same.
    """
    if not output_token_ids:
        return NOTHING_COMPARED
    known = [*prompt_token_ids, *output_token_ids[:-1]]
    plain = plain_logits(model, known, first=len(prompt_token_ids) - 1)
    top2 = np.partition(plain, -2, axis=-1)[:, -2:]
    return Comparison(
        num_tokens=len(output_token_ids),
        max_logit_difference=float(np.abs(plain - np.stack(served_logits)).max()),
        min_top2_margin=float((top2[:, 1] - top2[:, 0]).min()),
        tokens_agree=plain.argmax(axis=-1).tolist() == list(output_token_ids),
    )
