"""Helpers that several tests share: oracles, trained networks, and programs that run as processes of their own."""
