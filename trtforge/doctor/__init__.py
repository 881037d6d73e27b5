"""Checks whether this machine can run a build, and explains the first real error of a log."""
