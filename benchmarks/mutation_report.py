"""The record of a mutation run."""


def report(count: int, verdicts: list[dict[str, object]]) -> str:
    """Markdown."""
    return f"{count} {len(verdicts)}\n"
