"""Times of the scheduler beside vLLM's, and what its policies do."""
