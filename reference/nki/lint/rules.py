"""The rules."""

from . import (
    api_rules,
    host_rules,
    kernel_rules,
    loop_rules,
    register_rules,
    state_rules,
    value_rules,
)
from .scope import FileRule, Rule

OF_FUNCTIONS: tuple[Rule, ...] = (
    *kernel_rules.RULES,
    *state_rules.RULES,
    *register_rules.RULES,
    *loop_rules.RULES,
    *value_rules.RULES,
    *api_rules.RULES,
)
OF_FILES: tuple[FileRule, ...] = host_rules.RULES

# What `segattn lint` may be told to ignore or to take otherwise.
NAMES = (
    *("argument-order", "deprecated-api", "external-state", "fori-loop-body", "fori-loop-step"),
    *(
        "host-call",
        "induction-write",
        "integer-enum",
        "loop-bound",
        "loop-in-no-reorder",
        "missing-argument",
    ),
    *("missing-dst", "nested-dynamic-loop", "neuronxcc", "output-buffer", "psum-operand"),
    *("register-arithmetic", "register-condition", "removed-api", "removed-keyword"),
    *("string-buffer", "syntax", "tensor-value", "unknown-api", "unknown-keyword"),
    *("unsupported-api", "while-loop-body", "while-register"),
)
