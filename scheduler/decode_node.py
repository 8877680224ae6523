"""A disaggregated decode node: requests whose prompt is computed elsewhere (over vLLM only)."""

from typing import Any
from weakref import WeakSet


class DecodeNode:
    """Tells which waiting requests can share a step with decodes, as they add no prefill to it.

    The arrival of a request whose K and V are loaded while steps go on schedules no token, and the
    last token of its prompt, which is computed here to sample from, is a row of the decode batch.
    """

    def __init__(self, connector: Any) -> None:
        """Watch the answers of vLLM's KV `connector`."""
        self.joining: Any = None
        """The waiting request that the step at hand admits beside decodes."""
        self._computed_here: WeakSet[Any] = WeakSet()
        """Requests for which the connector had nothing to load after all."""
        ask = connector.get_num_new_matched_tokens

        def guarded(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            num_tokens, is_async = ask(request, num_computed_tokens)
            is_loaded_later = num_tokens is None or (num_tokens > 0 and is_async)
            if request is self.joining and not is_loaded_later:
                # vLLM asks again in a later step, in which the request is a prefill of its own.
                self._computed_here.add(request)
                return None, False
            return num_tokens, is_async

        connector.get_num_new_matched_tokens = guarded

    def adds_no_prefill(self, request: Any) -> bool:
        """Whether admitting `request` schedules its last token or none."""
        if request.num_computed_tokens > 0:
            return bool(request.num_computed_tokens == request.num_tokens - 1)
        params = request.kv_transfer_params or {}
        is_expected = params.get("do_remote_prefill") and not request.skip_reading_prefix_cache
        return bool(is_expected) and request not in self._computed_here
