"""Algorithms that make posteriors; they know neither Lightning nor disks."""
