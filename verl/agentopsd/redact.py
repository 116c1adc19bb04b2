"""Keeps tokens and keys out of everything that a run writes: by the name of a setting, and by their own form."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf

HIDDEN = "***"
_NAMES = r"(?:token|secret|password|passwd|passphrase|credentials?|(?:api|access|auth|private|secret)[_\-]?key)"
_SECRET_NAME = re.compile(rf"(?:^|[_\-.])(?:{_NAMES}|authorization)$", re.I)
_SECRET_FORMS = re.compile(
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_\-]{16,}"  # OpenAI and those who copy it
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|AKIA[0-9A-Z]{16}"  # AWS
    r"|xox[a-z]-[A-Za-z0-9\-]{8,}"  # Slack
    r"|eyJ[\w\-]{8,}\.[\w\-]{8,}(?:\.[\w\-]*)?"  # a JSON web token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=://)[^/?#\s'\"<>:]+:[^/?#\s'\"<>]+(?=@)"  # user:password in an address
    r"|(?:(?<=http://)|(?<=https://))[^/?#\s'\"<>]+(?=@)",  # a token alone before the host
    re.S,
)
# a quoted text to its end, or to the end of the line; else up to a space or comma, without the quotes that follow it
_QUOTED = r"(?P<quote>\\*['\"])(?:(?!(?P=quote))\\.|(?!(?P=quote)).)+(?:(?P=quote)|$)"
_VALUE = rf"(?:{_QUOTED}|[^\s,}}]*[^\s,}}'\"\\)\]])"
_PARAMETER = re.compile(rf"([?&](?:[\w.\-]*[_\-.])?{_NAMES}=)[^\s&#'\"]+", re.I)
_ASSIGNED = re.compile(rf"((?:^|[\s_\-.'\",;(\[{{]){_NAMES}\\*['\"]?\s*[=:]\s*){_VALUE}", re.I | re.M)
_OPTION = re.compile(
    rf"((?:^|[\s'\"])--?(?:[\w.\-]*[_\-.])?{_NAMES}(?:[ \t]+|['\"],[ \t]*(?=['\"])))(?!-){_VALUE}", re.I | re.M
)
_HEADER = re.compile(
    r"(authorization\\*['\"]?\s*[=:]\s*\\*['\"]?(?:bearer|basic|token|digest|negotiate)\s+)[^\s'\"\\]+"
    r"|(authorization\\*['\"]?\s*[=:]\s*\\*['\"]?)(?=[^\s'\"]*\d)[^\s'\"\\]{8,}"
    r"|(\bbearer\s+)(?=[^\s'\"]*\d)[\w.~+/\-]{8,}=*",
    re.I,
)
_MIN_LENGTH = 8
"""A shorter value of a secret variable ("none", "0") is not looked for in texts: it would be found everywhere."""


def redact(text: str) -> str:
    """``text`` without anything that looks like a secret or is the value of one of this process's secret variables."""
    for secret in _secret_values(frozenset(os.environ.items())):
        text = text.replace(secret, HIDDEN)
    text = _HEADER.sub(lambda found: (found[1] or found[2] or found[3]) + HIDDEN, _SECRET_FORMS.sub(HIDDEN, text))
    for pattern in (_PARAMETER, _ASSIGNED, _OPTION):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def redact_config(value: Any, name: str = "") -> Any:
    """A copy of a nested configuration in which every secret text is hidden; numbers and flags stay."""
    if isinstance(value, Mapping):
        return {key: redact_config(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_config(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if is_secret_name(name) else redact(value)


def redact_yaml(config: DictConfig) -> str:
    """The configuration as YAML with every secret hidden; interpolations stay as they are."""
    return OmegaConf.to_yaml(OmegaConf.create(redact_config(OmegaConf.to_container(config, resolve=False))))


def without_secrets(tracking: Callable[..., Any]) -> Callable[..., Any]:
    """verl's ``Tracking`` as it should be called: trackers upload the configuration that it is given."""

    def make(*args: Any, config: Any = None, **kwargs: Any) -> Any:
        return tracking(*args, config=redact_config(config), **kwargs)

    return make


def is_secret_name(name: str) -> bool:
    """``hf_token`` and ``WANDB_API_KEY`` are, ``max_action_tokens`` and ``tokenizer`` are not."""
    return _SECRET_NAME.search(name) is not None


@cache
def _secret_values(environment: frozenset[tuple[str, str]]) -> tuple[str, ...]:
    values = {value for name, value in environment if is_secret_name(name) and len(value) >= _MIN_LENGTH}
    return tuple(sorted(values, key=len, reverse=True))


class RedactingFile:
    """A text file to which nothing secret is written; a secret that is split over two writes is not noticed."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(redact(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
