"""Which documented NKI names the interpreter has."""
