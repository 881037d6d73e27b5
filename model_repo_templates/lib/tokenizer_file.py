"""The tokenizer of a model's directory."""

from tokenizers import Tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, with truncation and padding switched off."""
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
