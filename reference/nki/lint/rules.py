"""The rules by level."""

from . import (
    api_rules,
    class_rules,
    host_rules,
    kernel_rules,
    klr_assignments,
    klr_calls,
    klr_classes,
    klr_expressions,
    klr_functions,
    klr_libraries,
    klr_loops,
    klr_operators,
    loop_rules,
    python_rules,
    register_rules,
    state_rules,
    value_rules,
)
from .scope import FileRule, Rule

LEVEL_1: tuple[Rule, ...] = (
    *python_rules.RULES,
    *kernel_rules.RULES,
    *class_rules.RULES,
    *state_rules.RULES,
    *register_rules.RULES,
    *loop_rules.RULES,
    *value_rules.RULES,
    *api_rules.RULES,
)
LEVEL_2: tuple[Rule, ...] = (
    *klr_loops.RULES,
    *klr_assignments.RULES,
    *klr_functions.RULES,
    *klr_classes.RULES,
    *klr_operators.RULES,
    *klr_expressions.RULES,
    *klr_calls.RULES,
    *klr_libraries.RULES,
)
OF_FILES: tuple[FileRule, ...] = (*kernel_rules.FILE_RULES, *host_rules.RULES)
# What does not exist is left to the run, which sees whether it is reached.
_UNKNOWN = (api_rules.unknown_names, api_rules.unknown_attributes)
BEFORE_RUN: tuple[Rule, ...] = tuple(rule for rule in LEVEL_1 if rule not in _UNKNOWN)
