"""From engines to the LLM API: maps the settings of engines and repositories, and reports those that it drops."""
