"""Guided decoding: outputs that follow a JSON schema, a regular expression or a grammar, with xgrammar."""
