"""The Python subset of NKI kernels, checked before they run.

Level 1 is what the NKI compiler rejects or has deprecated, level 2 what the open KLR front end
rejects or evaluates differently. `segattn lint FILE` reports both; `check_kernel` is what the
interpreter calls before it runs a kernel.
"""

from .check import lint_file, lint_files, lint_source
from .finding import Finding, Kind
from .reach import check_kernel

__all__ = ["Finding", "Kind", "check_kernel", "lint_file", "lint_files", "lint_source"]
