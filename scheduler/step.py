"""One scheduling step while it is being decided, and the output made of it."""

from typing import TYPE_CHECKING

from .admission import Admission
from .output import CachedRequestData, NewRequestData, SchedulerOutput, StepKind
from .request import Request

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Step:
    """Decisions of one step, in the order in which they are made; kept until it comes back.

    `new_block_ids` has an entry for each request that got blocks; it is the whole block table for
    requests that are new or resumed.
    """

    __slots__ = (
        "admission_stop",
        "admitted",
        "chunks_before",
        "defer_prefills",
        "draft_slots",
        "has_prefill",
        "input_budget",
        "needs_drafts",
        "new_block_ids",
        "newly_cached",
        "num_scheduled_tokens",
        "output",
        "passed_over",
        "preempted",
        "resumed_req_ids",
        "running",
        "spec_token_ids",
        "threshold",
        "token_budget",
        "unsampled",
    )

    def __init__(self, token_budget: int, input_budget: int, draft_slots: int) -> None:
        self.token_budget = token_budget
        self.input_budget = input_budget
        """Tokens that the runner's buffers hold, `draft_slots` per request for its drafts."""
        self.draft_slots = draft_slots
        self.threshold = 0
        self.defer_prefills = False
        self.chunks_before: set[str] = set()
        """Running requests that go on in the middle of their prefill."""
        self.has_prefill = False
        """Whether such a request goes on, or one with more than one token to compute starts."""
        self.needs_drafts = False
        self.admission_stop = Admission.ADMITTED
        self.running: list[Request] = []
        self.admitted: list[Request] = []
        self.resumed_req_ids: set[str] = set()
        self.preempted: list[Request] = []
        self.passed_over: list[Request] = []
        """Waiting requests that must wait for their tokens in flight, while others go on."""
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new_block_ids: dict[str, list[int]] = {}
        self.spec_token_ids: dict[str, list[int]] = {}
        self.newly_cached: list[tuple[int, bytes]] = []
        """Blocks that others find since this step, with their digests."""
        self.unsampled: set[str] = set()
        """Scheduled requests that end the step in the middle of their prefill."""
        self.output: SchedulerOutput | None = None
        """None until all is decided."""

    @property
    def room(self) -> int:
        """Tokens that one more request may take."""
        return min(self.token_budget, self.input_budget - self.draft_slots)

    @property
    def requests(self) -> list[Request]:
        """All scheduled requests in the order of `num_scheduled_tokens`."""
        return self.running + self.admitted if self.admitted else self.running

    def take(self, request: Request, num_tokens: int) -> None:
        """Schedule tokens of a request."""
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.token_budget -= num_tokens
        self.input_budget -= num_tokens + self.draft_slots

    def unschedule(self, request: Request) -> None:
        """Take back the tokens of a running request that is preempted, if it has any."""
        request_id = request.request_id
        if request_id in self.num_scheduled_tokens:
            self.running.remove(request)
            num_tokens = self.num_scheduled_tokens.pop(request_id)
            self.token_budget += num_tokens
            self.input_budget += num_tokens + self.draft_slots
            self.new_block_ids.pop(request_id, None)
            self.spec_token_ids.pop(request_id, None)

    def make_output(
        self,
        previously_scheduled: set[str],
        told_anew: set[str],
        finished_req_ids: set[str],
        preempted_req_ids: set[str],
    ) -> SchedulerOutput:
        """The output of the step, before its tokens count as computed.

        Tokens of cached requests that are not in `previously_scheduled` are sent again. Those in
        `told_anew` are reported as resumed: what an earlier step told of them may be lost.
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
        resumed_req_ids, new_block_ids = self.resumed_req_ids, self.new_block_ids
        if told_anew:
            anew = {r.request_id: r.block_ids.copy() for r in cached if r.request_id in told_anew}
            resumed_req_ids, new_block_ids = resumed_req_ids | anew.keys(), new_block_ids | anew
        return SchedulerOutput(
            new,
            CachedRequestData(
                req_ids,
                resumed_req_ids,
                [],
                all_token_ids,
                [(new_block_ids[name],) if name in new_block_ids else None for name in req_ids]
                if new_block_ids
                else [None] * len(req_ids),
                num_computed_tokens,
                num_output_tokens,
            ),
            self.num_scheduled_tokens,
            sum(self.num_scheduled_tokens.values()),
            self.spec_token_ids,
            [],
            finished_req_ids,
            preempted_req_ids,
            step_kind=self._kind(),
        )

    def _kind(self) -> StepKind:
        if not self.num_scheduled_tokens:
            return "empty"
        if not self.admitted and not self.chunks_before:
            return "decode"
        prefills = sum(
            request.num_computed_tokens < request.num_tokens - (request.num_output_tokens > 0)
            for request in self.requests
        )
        if not prefills:
            return "decode"
        return "prefill" if prefills == len(self.num_scheduled_tokens) else "mixed"

    def _new_and_cached(self) -> tuple[list[NewRequestData], list[Request]]:
        if not self.admitted:
            return [], self.running
        new, resumed = [], []
        for request in self.admitted:
            if request.request_id in self.resumed_req_ids:
                resumed.append(request)
            else:
                new.append(
                    NewRequestData(
                        request.request_id,
                        request.prompt_token_ids,
                        (self.new_block_ids[request.request_id],),
                        request.num_computed_tokens,
                    )
                )
        return new, self.running + resumed


def advance(scheduler: "Scheduler", step: Step, num_drafts_next: int) -> None:
    """Count the scheduled tokens as computed."""
    is_async, drafts = scheduler.is_async, step.spec_token_ids
    for request, num_new in zip(step.requests, step.num_scheduled_tokens.values(), strict=True):
        request.num_computed_tokens = num_computed = request.num_computed_tokens + num_new
        request.num_in_flight_tokens += num_new
        num_placeholders = request.num_output_placeholders
        if num_computed < request.num_tokens + num_placeholders:
            request.is_prefill_chunk = True
            step.unsampled.add(request.request_id)
            continue
        request.is_prefill_chunk = False
        if is_async:
            num_drafts = len(drafts[request.request_id]) if request.request_id in drafts else 0
            request.num_output_placeholders = num_placeholders + 1 + num_drafts
            # The next drafts are not known either; the runner fills them in.
            if num_drafts_next:
                request.spec_token_ids = scheduler.drafts_after(request, num_drafts_next)
    if scheduler.config.prefill_schedule_interval > 1 and step.has_prefill:
        scheduler.last_prefill_step = scheduler.num_executed_steps + 1
