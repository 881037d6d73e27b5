"""Floor 5: the build of a recipe in ordered stages, with its preflight check, report and lock file."""
