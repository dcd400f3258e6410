"""Symmetries by dimensional analysis: a network is a formula, its symmetries are changes of units.

Every tensor, weight or activation, is a product of factors: arrays of labels that broadcast to its
shape, each with a power for scales and a parity for signs (`values`). What a network computes says
which labels move together and whose units must agree (`system`). There are three rules for that
(`arithmetic`): sums need equal units, products multiply them, a sum over a dimension consumes it.
Operations that only move numbers are executed on the labels, all others are measured on random
numbers (`reading`, `probe`). Linear systems over the rationals and over two elements give scales
and signs (`scales`), automorphisms of one coloured graph give permutations (`exchanges`), and rows
of labels that nothing tells apart give matrices (`matrices`).
"""
