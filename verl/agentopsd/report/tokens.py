"""The texts of a turn's tokens, for reading beside their gaps."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any


class TokenTexts:
    """Cuts a turn's text the way the run's tokenizer does.

    Records hold the text and one gap per sampled token, not the ids. The text is cut again, and the pieces are shown
    only where their number agrees with the number of gaps; the sampled end-of-turn token has no text of its own.
    """

    END = "⏎"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.split = lru_cache(maxsize=50_000)(self._split)

    @classmethod
    def of_run(cls, run_dir: Path, model: str | None) -> TokenTexts | None:
        """From the run's latest checkpoint or, if that is a folder, from the model; ``None`` without a tokenizer."""
        checkpoints = sorted(run_dir.glob("checkpoints/global_step_*/actor/huggingface/tokenizer.json"))
        candidates = [*reversed(checkpoints), *([Path(model) / "tokenizer.json"] if model else [])]
        for file in candidates:
            if not file.is_file():
                continue
            try:
                from tokenizers import Tokenizer

                return cls(Tokenizer.from_file(str(file)))
            except Exception:  # tokenizers raises bare Exception; the numbers are shown without texts
                continue
        return None

    def _split(self, text: str, count: int) -> list[str] | None:
        try:
            offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        except (TypeError, ValueError, UnicodeError):
            return None
        if count - len(offsets) not in (0, 1):
            return None
        pieces = [text[start:end] for start, end in offsets]
        return pieces if count == len(offsets) else [*pieces, self.END]
