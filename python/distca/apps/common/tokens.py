"""Tokenizers of transformers, from local files."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from distca.apps.common.options import ConfigError


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
        except Exception as error:  # it may be of many types, plain Exception among them
            raise ConfigError(f"--tokenizer is {path}, which transformers cannot read: {error}") from error
        self.digest = self._digest()

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self._tokenizer)

    def encode_all(self, texts: Sequence[str]) -> list[array[int]]:
        """The tokens of each text, with the special tokens that the tokenizer adds by itself."""
        if not texts:
            return []
        return [array("i", tokens) for tokens in self._tokenizer(list(texts), verbose=False).input_ids]

    def save(self, folder: Path) -> None:
        """Writes the files of the tokenizer that transformers reads."""
        self._tokenizer.save_pretrained(str(folder))

    def _digest(self) -> str:
        """A digest that is the same for tokenizers that make the same tokens of every text."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else json.dumps(sorted(self._tokenizer.get_vocab().items()))
        options = {name: str(value) for name, value in self._tokenizer.init_kwargs.items() if "path" not in name}
        parts = [transformers.__version__, type(self._tokenizer).__name__, content, json.dumps(options, sort_keys=True)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()
