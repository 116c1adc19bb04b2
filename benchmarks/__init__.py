"""Measurements that anyone can repeat: ``python -m benchmarks.NAME``; ``python -m benchmarks.all`` runs them all.

Every claim is a ratio from one run on one machine: the two sides take turns, so that a busy machine slows both.
"""
