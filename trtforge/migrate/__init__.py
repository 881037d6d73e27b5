"""Migration from engines to the LLM API: maps the settings of engines and repositories, and reports dropped ones."""
