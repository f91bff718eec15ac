"""Foundations of every layer: errors, settings, registries, devices, records and random numbers; needs torch only."""
