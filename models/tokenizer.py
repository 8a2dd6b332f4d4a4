"""Whisper's tokenizer.json, which every layout of its weights has."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers


class Tokenizer:
    """Text to token ids and back, in the form that models/ladder.py takes them."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be read, ValueError where it is no tokenizer."""
        text = path.read_text("utf-8")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers has no type of its own for a file that it cannot use
            raise ValueError(f"{path.name} cannot be used: {error}") from error

    def id_of(self, token: str) -> int | None:
        """A token's number, None where there is no such token."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def encode(self, text: str) -> list[int]:
        """Without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Without the special tokens among them."""
        return str(self._tokenizer.decode(tokens))
