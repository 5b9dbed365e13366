"""Grammars of outputs, as llguidance reads them: the tokenizer checks, mask workers compile.

Both go through here, so what passes the check is what is compiled.
"""

import hashlib
from typing import Literal, get_args

import msgspec
from llguidance import LLMatcher, LLParserLimits

from deepmesh.wire.messages import Grammar, Ids

Kind = Literal["json_schema", "regex", "lark", "tools", "calls"]
# "tools" and "calls" are Lark, too, and may use the model's own markers: free text that may end
# in calls of tools, and calls that have to come.
KINDS: tuple[str, ...] = get_args(Kind)
MAY_STOP_EARLY = frozenset({"tools"})  # before `start_after`: nothing was promised
MAY_USE_MARKERS = frozenset({"tools", "calls"})

MAX_TEXT_BYTES = 512 << 10
# White space between two parts of a JSON text: a blank, or a line end and an indentation. A model
# that likes blanks would otherwise never come to the point.
WHITESPACE = r"(\x20|\x0D?\x0A[\x20\x09]{0,32})"

_MAX_VERDICTS = 4096
_verdicts: dict[bytes, str] = {}  # problems by hash of the grammar


class GrammarError(ValueError):
    """The grammar cannot be compiled; the text says why."""


def make_grammar(kind: Kind, text: str, start_after: Ids = b"") -> Grammar:
    """The message; its hash is that of what is compiled, whatever it starts after."""
    digest = hashlib.blake2b(f"{kind}\n{text}".encode("utf-8", "surrogatepass"), digest_size=16)
    return Grammar(kind, text, start_after, digest.digest())


def compile_limits() -> LLParserLimits:
    """What a grammar may cost: about 0.1 s to build, 14 ms a mask at the very worst."""
    return LLParserLimits(
        initial_lexer_fuel=5_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_grammar_size=200_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def llguidance_source(grammar: Grammar) -> str:
    """What `LLMatcher` takes.

    Raises:
        GrammarError: an unknown kind, too much text, or a schema that is no JSON object.
    """
    size = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size > MAX_TEXT_BYTES:
        raise GrammarError(f"it has {size} bytes; at most {MAX_TEXT_BYTES} are compiled")
    match grammar.kind:
        case "json_schema":
            return _schema_source(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark" | "tools" | "calls":
            return LLMatcher.grammar_from_lark(grammar.text)
        case _:
            raise GrammarError(f"its kind {grammar.kind!r} is none of {', '.join(KINDS)}")


def _schema_source(text: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(
            text,
            overrides={"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False},
        )
    except ValueError as error:
        raise GrammarError(str(error)) from error


def problem_of(grammar: Grammar) -> str:
    """Why it cannot be compiled, in llguidance's words; empty if it can.

    Needs no vocabulary: what depends on one (tokens by name or number) is not looked at. One that a
    stranger sent may end this process: `grammar_judge` asks here in a child.
    """
    try:
        source = llguidance_source(grammar)
        text = LLMatcher.validate_grammar(source, limits=compile_limits())
        return "" if text.startswith("WARNING") else text
    except GrammarError as error:
        return str(error)
    except ValueError as error:  # half a surrogate pair
        return f"it is no text: {error}"


def known_problem(grammar: Grammar) -> str | None:
    """The verdict on a grammar that has been judged lately; None: it has not."""
    return _verdicts.get(grammar.hash)


def remember(grammar: Grammar, problem: str) -> None:
    """Keep a verdict."""
    if len(_verdicts) >= _MAX_VERDICTS:
        _verdicts.clear()
    _verdicts[grammar.hash] = problem


def schema_text(schema: object) -> str:
    """A JSON Schema as the text of a grammar: the order of properties is that of the output."""
    return msgspec.json.encode(schema).decode()
