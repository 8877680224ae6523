"""A second, smaller evaluator of instruction traces, written apart from the cost model."""
