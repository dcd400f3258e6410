"""Tests of engines are left out where `weightsym-fast` is not there."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("weightsym_fast") else ["test_*.py"]
