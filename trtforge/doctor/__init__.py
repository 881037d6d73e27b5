"""Stage-level help: checks whether this machine is fit for a build, and explains the first real error of a log."""
