"""Benchmarks: each prints ratios against a plain reference measured in the same run."""
