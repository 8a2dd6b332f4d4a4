"""Whisper's tokenizer.json, which every layout of its weights has."""

from pathlib import Path

import tokenizers


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Raises OSError where it cannot be read, ValueError where it is no tokenizer."""
    text = path.read_text("utf-8")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers has no type of its own for a file that it cannot use
        raise ValueError(f"{path.name} cannot be used: {error}") from error
