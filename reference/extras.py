"""The error for an optional dependency that is not installed."""


class MissingExtraError(ImportError):
    """A library of one of the package's extras is missing; the message names the extra."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"{module!r} is not installed: pip install 'segattn[{extra}]' brings it", name=module
        )
