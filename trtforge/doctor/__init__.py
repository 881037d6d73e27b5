"""Stage-level help: is this machine fit for a build, and what was the first real error of a log."""
