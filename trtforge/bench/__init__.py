"""Measurements that anyone can repeat: each prints a ratio against a peer that runs in the same process."""
