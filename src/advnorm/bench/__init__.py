"""Benchmarks of speed and memory: each compares with a plain reference in the same run."""
