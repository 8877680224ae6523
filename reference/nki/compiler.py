"""`nki.compiler`: importable so that kernel files load; there is no compiler here."""


def __getattr__(name: str) -> object:
    """Raise AttributeError that says why there is nothing."""
    raise AttributeError(
        f"nki.compiler.{name}: the interpreter has no compiler; the real nki package from AWS has"
    )
