"""Which layers a name, a regular expression or a glob means."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

REGEX_PREFIX = "re:"
_REGEX_MARKS = set("*+?[](){}|^$\\")


def matches(pattern: str, layer: str) -> bool:
    """Args: pattern: a layer's name, `re:` and a regular expression for the beginning of it, or a glob."""
    if pattern.startswith(REGEX_PREFIX):
        return re.match(pattern.removeprefix(REGEX_PREFIX), layer) is not None
    return pattern == layer or fnmatchcase(layer, pattern)


def by_precedence(patterns: Iterable[str]) -> list[str]:
    """Names before patterns; else in the order given."""
    return sorted(patterns, key=lambda pattern: pattern.startswith(REGEX_PREFIX) or any(c in pattern for c in "*?["))


def why_not_a_pattern(pattern: object) -> str | None:
    """What is wrong with it, or None."""
    if not isinstance(pattern, str) or not pattern:
        return f"must be a layer's name, re: and a regular expression, or a glob, got {pattern!r}"
    if pattern.startswith(REGEX_PREFIX):
        try:
            re.compile(pattern.removeprefix(REGEX_PREFIX))
        except re.error as error:
            return f"is not a regular expression ({error}), got {pattern!r}"
    return None


def is_skipped(modules: Iterable[str], layer: str) -> bool:
    """Whether a `modules_to_not_convert` names the layer: by a part of its path, which begins and ends where names do,
    or by a regular expression for the beginning of it.
    """
    return any(
        f".{module.strip('.')}." in f".{layer}."
        # Dots of a plain name are no wildcards.
        or (set(module) & _REGEX_MARKS and re.match(rf"(?:{module})(?:(?<=\.)|(?=\.|$))", layer))
        for module in modules
    )
