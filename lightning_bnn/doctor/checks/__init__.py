"""Checks of the doctor, one function each: from evidence to a finding, or None if all is well.

A check that cannot be made raises `NotPossible` and says why. The name of a function is that of
its verdict.
"""
