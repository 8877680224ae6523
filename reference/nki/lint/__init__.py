"""What the source of NKI kernels says and no run on this machine would see: `segattn lint FILE`.

A kernel is traced by plain Python, so any Python is allowed. Reported are API that NKI removed,
deprecated or never had, also in branches that a run does not take; values of the device in Python
control flow; loop bodies that the device cannot hold; state outside of the kernel.
"""

from .check import lint_file, lint_files, lint_source
from .finding import Finding, Kind

__all__ = ["Finding", "Kind", "lint_file", "lint_files", "lint_source"]
