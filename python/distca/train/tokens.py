"""Tokenizers: those of transformers, from local files."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from distca.train.config import ConfigError

BYTES = 256
"""Size of the vocabulary without a tokenizer: each byte is a token."""


class Tokenizer:
    """A tokenizer of transformers, from its folder or its `tokenizer.json`. Nothing is downloaded."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise ConfigError(f"--tokenizer is {path}, must be a local folder or tokenizer.json; nothing is downloaded")
        self._tokenizer: Any
        try:
            if path.is_file():
                self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
            else:
                self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # of many types, plain Exception among them
            raise ConfigError(f"--tokenizer is {path}, which transformers cannot read: {error}") from error

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self._tokenizer)

    def encode(self, text: str) -> array[int]:
        """Tokens of a document, with the special tokens that the tokenizer adds by itself."""
        return array("i", self._tokenizer(text, verbose=False).input_ids)

    def save(self, folder: Path) -> None:
        """Writes the files that transformers reads."""
        self._tokenizer.save_pretrained(str(folder))
