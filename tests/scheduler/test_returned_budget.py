"""Tokens of a request that is preempted in the step that scheduled it go to others."""

from segattn.scheduler import DraftTokenIds, ModelRunnerOutput, Request, Scheduler, SchedulerConfig


def test_the_budget_of_an_unscheduled_victim_serves_the_requests_behind() -> None:
    config = SchedulerConfig(3, 3, 16, 1, 7, policy="priority", enable_prefix_caching=False)
    scheduler = Scheduler(config)
    steps = []
    for arriving in (("low", 5),), (("high", 0), ("mid", 1)):
        for name, priority in arriving:
            scheduler.add_request(Request(name, [5], 8, priority=priority))
        output = scheduler.schedule()
        steps.append(output.num_scheduled_tokens)
        names = list(output.num_scheduled_tokens)
        scheduler.update_from_output(output, ModelRunnerOutput(names, [[6]] * len(names)))
    assert steps == [{"low": 1}, {"low": 1, "high": 1, "mid": 1}]
    # 4 of 6 blocks are owned. With its draft "low" takes 2 tokens of 3 and the last 2 blocks, so
    # "high" preempts it: 3 tokens are there again, 1 for "high" and 1 for "mid".
    scheduler.update_draft_token_ids(DraftTokenIds(["low"], [[7]]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"high": 1, "mid": 1}
    assert output.preempted_req_ids == {"low"}
