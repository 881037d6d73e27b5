"""From engines to the LLM API: what an engine's and a repository's settings become, and what becomes of the rest."""
