"""The frameworks that benchmarks/audit.py runs: one file each, and the problem that all of them are given."""
