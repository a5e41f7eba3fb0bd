"""Chat templates: jinja2 source that comes with a model and writes a conversation as one text.

The environment is the one templates are written for: an immutable sandbox, trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, and `{% generation %}` blocks.
"""

import json
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm_triton.errors import RequestError


class ChatTemplate:
    """One template, compiled on first use."""

    def __init__(self, source: str):
        self.source = source

    def render(self, **variables: Any) -> str:
        """The text. Raises: RequestError(param="messages") with the template's reason."""
        try:
            return self._compiled.render(**variables)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(f"the model's chat template has a syntax error: {error}", "messages") from error
        except Exception as error:  # The template is a program, run on the user's data: it can raise anything.
            raise RequestError(f"the chat template refused the messages: {error}", "messages") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self.source)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it only writes its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
