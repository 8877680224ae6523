"""One scheduling step while it is being decided, and the output made of it."""

from .admission import Admission
from .output import CachedRequestData, NewRequestData, SchedulerOutput
from .request import Request


class Step:
    """Decisions of one step, in the order in which they are made.

    `new_block_ids` has an entry for each request that got blocks; it is the whole block table for
    requests that are new or resumed.
    """

    __slots__ = (
        "admission_stop",
        "admitted",
        "defer_prefills",
        "new_block_ids",
        "num_scheduled_tokens",
        "preempted",
        "resumed_req_ids",
        "running",
        "spec_token_ids",
        "token_budget",
    )

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.defer_prefills = False
        self.admission_stop = Admission.ADMITTED
        self.running: list[Request] = []
        self.admitted: list[Request] = []
        self.resumed_req_ids: set[str] = set()
        self.preempted: list[Request] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new_block_ids: dict[str, list[int]] = {}
        self.spec_token_ids: dict[str, list[int]] = {}

    def unschedule(self, request: Request) -> bool:
        """Take back the tokens of a running request that is preempted; False if it has none."""
        request_id = request.request_id
        if request_id not in self.num_scheduled_tokens:
            return False
        self.running.remove(request)
        self.token_budget += self.num_scheduled_tokens.pop(request_id)
        self.new_block_ids.pop(request_id, None)
        self.spec_token_ids.pop(request_id, None)
        return True

    def make_output(
        self,
        previously_scheduled: set[str],
        num_common_prefix_blocks: int,
        finished_req_ids: set[str],
        num_speculative_tokens: int,
    ) -> SchedulerOutput:
        """The output of the step, before its tokens count as computed.

        Tokens of cached requests that are not in `previously_scheduled` are sent again.
        """
        new, cached = self._new_and_cached()
        # One loop, and the fields by position: an output is made in every step.
        req_ids, num_computed_tokens, num_output_tokens = [], [], []
        for request in cached:
            req_ids.append(request.request_id)
            num_computed_tokens.append(request.num_computed_tokens)
            num_output_tokens.append(request.num_output_tokens + request.num_output_placeholders)
        all_token_ids = {}
        if not previously_scheduled.issuperset(req_ids):
            all_token_ids = {
                request.request_id: request.all_token_ids
                for request in cached
                if request.request_id not in previously_scheduled
            }
        return SchedulerOutput(
            new,
            CachedRequestData(
                req_ids,
                self.resumed_req_ids,
                [],
                all_token_ids,
                self._new_block_ids(req_ids),
                num_computed_tokens,
                num_output_tokens,
            ),
            self.num_scheduled_tokens,
            sum(self.num_scheduled_tokens.values()),
            self.spec_token_ids,
            [num_common_prefix_blocks],
            finished_req_ids,
            {request.request_id for request in self.preempted} if self.preempted else set(),
            num_speculative_tokens,
        )

    def _new_and_cached(self) -> tuple[list[NewRequestData], list[Request]]:
        if not self.admitted:
            return [], self.running
        new, resumed = [], []
        for request in self.admitted:
            if request.request_id in self.resumed_req_ids:
                resumed.append(request)
            else:
                block_ids = self.new_block_ids[request.request_id]
                new.append(
                    NewRequestData(
                        request.request_id,
                        request.prompt_token_ids,
                        (block_ids,),
                        request.num_computed_tokens,
                    )
                )
        return new, self.running + resumed

    def _new_block_ids(self, req_ids: list[str]) -> list[tuple[list[int], ...] | None]:
        if not self.new_block_ids:
            return [None] * len(req_ids)
        block_ids = map(self.new_block_ids.get, req_ids)
        return [None if blocks is None else (blocks,) for blocks in block_ids]
