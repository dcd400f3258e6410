"""Canonical forms of networks, their least mass, and orders of their units."""
