"""What clients may ask of an answer's form: which grammar it becomes, and what is refused how."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from deepmesh.grammars import compile_limits, llguidance_source, problem_of
from deepmesh.wire.messages import ErrorCode, Grammar, Submit
from deepmesh.wire.packed import unpack_ids
from services.executor.masks.vocabulary import MaskVocabulary
from services.tokenizer.prepare import Generation, Preparer
from services.tokenizer.refusal import Refusal
from tests.services.tokenizer_harness import HI, MODEL, PLAIN, TOKENIZER, ids_of, make_config
from tests.tiny import VOCAB_SIZE

Json = dict[str, Any]  # Any: bodies as clients write them
CONTEXT = 4096
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["city", "days"],
}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
OTHER_TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
BASE = {
    "chat": {"model": "tiny", "messages": HI},
    "responses": {"model": "tiny", "input": "Hi"},
    "messages": {"model": "tiny", "messages": HI, "max_tokens": 64},
    "completions": {"model": "tiny", "prompt": "Hi"},
}


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    return Preparer(make_config(tmp_path_factory.mktemp("run")))


def generation(preparer: Preparer, protocol: str, change: Json) -> Generation:
    body = json.dumps(BASE[protocol] | change).encode()
    made = preparer.prepare(Submit(b"0" * 16, protocol, body, 1), CONTEXT)
    assert isinstance(made, Generation)
    return made


def grammar(preparer: Preparer, protocol: str, change: Json) -> Grammar:
    found = generation(preparer, protocol, change).grammar
    assert found is not None
    return found


def refusal(preparer: Preparer, protocol: str, change: Json) -> Refusal:
    with pytest.raises(Refusal) as found:
        generation(preparer, protocol, change)
    assert found.value.code is ErrorCode.INVALID
    return found.value


VOCABULARY = MaskVocabulary(MODEL, VOCAB_SIZE)


def takes(found: Grammar, text: str) -> bool:
    """Whether the text is a whole output of the grammar, in the model's tokens."""
    matcher = LLMatcher(
        VOCABULARY.tokenizer, llguidance_source(found), log_level=0, limits=compile_limits()
    )
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids_of(text)) == len(ids_of(text)) and matcher.is_accepting()


def call(name: str, **parameters: str) -> str:
    """One DSML call; values in their JSON spelling, or with a leading ~ as text."""
    lines = "".join(
        f'<｜DSML｜ parameter name="{key}" string="{str(v.startswith("~")).lower()}">'
        f"{v.removeprefix('~')}</｜DSML｜ parameter>\n"
        for key, v in parameters.items()
    )
    return f'<｜DSML｜ invoke name="{name}">\n{lines}</｜DSML｜ invoke>\n'


def block(*calls: str) -> str:
    return f"<｜DSML｜ calls>\n{''.join(calls)}</｜DSML｜ calls>"


# ---------------------------------------------------------------- formats

FORMATS = [
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}}),
    (
        "chat",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "strict": True, "schema": PERSON},
            }
        },
    ),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}}),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}}),
    ("messages", {"output_format": {"type": "json_schema", "schema": PERSON}}),
    ("chat", {"guided_json": PERSON}),
    ("chat", {"guided_json": json.dumps(PERSON)}),
    ("chat", {"structured_outputs": {"json": PERSON}}),
    ("chat", {"json_schema": json.dumps(PERSON)}),
    ("completions", {"guided_json": PERSON}),
    (
        "completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
    ),
]


@pytest.mark.parametrize(("protocol", "change"), FORMATS)
def test_every_spelling_of_a_schema_is_kept_to(
    preparer: Preparer, protocol: str, change: Json
) -> None:
    found = grammar(preparer, protocol, change)
    assert found.kind == "json_schema"
    assert takes(found, '{"name": "Ada", "age": 36}')
    assert takes(found, '{\n  "name": "Ada",\n  "age": 36\n}')
    assert not takes(found, '{"name": "Ada"}')
    assert not takes(found, '{"name": "Ada", "age": "36"}')
    assert not takes(found, '{"name": "Ada", "age": 36, "x": 1}')


@pytest.mark.parametrize(
    ("change", "right", "wrong"),
    [
        ({"guided_regex": "[0-9]{3}"}, "123", "12"),
        ({"regex": "[0-9]{3}"}, "123", "1234"),
        ({"structured_outputs": {"regex": "a|b"}}, "a", "c"),
        ({"guided_choice": ["yes", 'no "way"']}, 'no "way"', "maybe"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "nope"),
        ({"guided_grammar": 'start: "a" b+\nb: "b"\n'}, "abb", "a"),
        ({"ebnf": 'root ::= "a" b+\nb ::= "b"\n'}, "abb", "ba"),
        ({"guided_json_object": True}, '{"a": [1, null]}', "[1]"),
        ({"response_format": {"type": "regex", "pattern": "x+"}}, "xx", "y"),
    ],
)
@pytest.mark.parametrize("protocol", ["chat", "completions"])
def test_other_forms(
    preparer: Preparer, protocol: str, change: Json, right: str, wrong: str
) -> None:
    found = grammar(preparer, protocol, change)
    assert takes(found, right)
    assert not takes(found, wrong)


def test_the_order_of_properties_is_the_schemas(preparer: Preparer) -> None:
    found = grammar(preparer, "chat", {"guided_json": PERSON})
    assert not takes(found, '{"age": 36, "name": "Ada"}')


def test_annotations_do_not_matter(preparer: Preparer) -> None:
    schema = {
        **PERSON,
        "title": "P",
        "description": "x",
        "examples": [1],
        "default": {},
        "x-order": 3,
    }
    assert takes(grammar(preparer, "chat", {"guided_json": schema}), '{"name": "A", "age": 1}')


def test_masks_begin_behind_thinking_where_there_is_thinking(preparer: Preparer) -> None:
    end = TOKENIZER.token_to_id("</think>")
    change = {"guided_choice": ["yes", "no"]}
    assert unpack_ids(grammar(preparer, "chat", change).start_after).tolist() == [end]
    assert grammar(preparer, "chat", change | PLAIN).start_after == b""
    assert grammar(preparer, "completions", change).start_after == b""


def test_every_choice_keeps_to_it(preparer: Preparer) -> None:
    made = generation(preparer, "chat", {"guided_choice": ["yes", "no"], "n": 3})
    assert [choice.grammar for choice in made.choices] == [made.grammar] * 3


def test_the_messages_protocol_tells_the_model_its_schema(preparer: Preparer) -> None:
    change = {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}}
    plain = generation(preparer, "messages", {"system": "Be kind."})
    told = generation(preparer, "messages", {"system": "Be kind.", **change})
    prompt = TOKENIZER.decode(unpack_ids(told.prompt_ids).tolist(), skip_special_tokens=False)
    assert "Be kind." in prompt
    assert '"age"' in prompt
    assert told.prompt_len > plain.prompt_len


@pytest.mark.parametrize(
    ("schema", "path", "word"),
    [
        ({"enum": []}, ".enum", "enum"),
        ({"type": "strin"}, ".type", "type"),
        ({"not": {"type": "string"}}, ".not", "not"),
        ({"type": "array", "uniqueItems": True}, ".uniqueItems", "uniqueItems"),
        ({"minlength": 3}, ".minlength", "minlength"),
        ({"nullable": True}, ".nullable", "nullable"),
        ({"if": {}, "then": {}}, ".if", "if"),
        ({"$ref": "https://example.org/s.json"}, ".$ref", "$ref"),
        ({"$ref": "other.json#/a"}, ".$ref", "$ref"),
        ({"type": "string", "pattern": "a(?=b)"}, ".pattern", "look-ahead"),
        ({"type": "string", "pattern": "(?<!a)b"}, ".pattern", "look-behind"),
        ({"type": "string", "pattern": r"(a)\1"}, ".pattern", "back-references"),
        ({"type": "string", "format": "color"}, ".format", "format"),
        ({"properties": {"a": {"not": {}}}}, ".properties.a.not", "not"),
        ({"properties": {"a": 5}}, ".properties.a", "JSON Schema"),
        ({"items": {"anyOf": []}}, ".items.anyOf", "anyOf"),
        ({"x-guidance": {"lenient": True}}, ".x-guidance", "x-guidance"),
        ({"required": "a"}, ".required", "required"),
        (False, "", "false"),
        (5, "", "JSON Schema"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused_by_its_keyword(
    preparer: Preparer, schema: object, path: str, word: str
) -> None:
    found = refusal(preparer, "chat", {"guided_json": schema})
    assert found.param == f"guided_json{path}"
    assert word in found.detail


def test_what_only_the_engine_knows_names_the_keyword_too(preparer: Preparer) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}
    found = refusal(preparer, "chat", {"guided_json": schema})
    assert "oneOf" in found.detail
    assert found.param == "guided_json"


def test_strict_needs_an_object_at_the_top(preparer: Preparer) -> None:
    format_ = {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": {"type": "array"}},
    }
    found = refusal(preparer, "chat", {"response_format": format_})
    assert found.param == "response_format.json_schema.schema.type"
    format_["json_schema"]["strict"] = False
    assert takes(grammar(preparer, "chat", {"response_format": format_}), "[1, 2]")


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("guided_regex", {"guided_regex": "a(?=b)"}),
        ("guided_regex", {"guided_regex": "(("}),
        ("guided_regex", {"guided_regex": 5}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_choice[1]", {"guided_choice": ["a", ""]}),
        ("guided_choice[0]", {"guided_choice": [1]}),
        ("guided_grammar", {"guided_grammar": "start: undefined_rule\n"}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": {}}}),
        ("guided_regex", {"guided_regex": "a", "guided_json": PERSON}),
        ("structured_outputs.regex", {"structured_outputs": {"json": {}, "regex": "a"}}),
        ("ignore_eos", {"guided_regex": "a", "ignore_eos": True}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        ),
    ],
)
def test_other_faults(preparer: Preparer, param: str, change: Json) -> None:
    assert refusal(preparer, "chat", change).param == param


def test_pattern_and_length_hold_together(preparer: Preparer) -> None:
    """Known from other servers: one of the two was dropped."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
            "b": {"type": "array", "items": {"type": "string", "pattern": "^x[0-9]$"}},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    found = grammar(preparer, "chat", {"guided_json": schema})
    assert takes(found, '{"a": "abc", "b": ["x1", "x2"]}')
    assert not takes(found, '{"a": "abcd", "b": []}')
    assert not takes(found, '{"a": "aB", "b": []}')
    assert not takes(found, '{"a": "abc", "b": ["x1", "y2"]}')


# ---------------------------------------------------------------- tools


def tools(**more: object) -> Json:
    return {"tools": [CHAT_TOOL, OTHER_TOOL], **more}


def test_free_text_may_end_in_calls_of_known_tools(preparer: Preparer) -> None:
    found = grammar(preparer, "chat", tools())
    assert found.kind == "tools"
    good = call("weather", city="~Paris", days="3")
    assert takes(found, "Just an answer.")
    assert takes(found, "Let me see.\n\n" + block(good))
    assert takes(found, block(good, call("time")))
    assert takes(found, block(call("weather", city="~Rome", days="1", unit="~kelvin")))
    assert not takes(found, block(call("wether", city="~Paris", days="3")))
    assert not takes(found, block(call("weather", city="~Paris", days="8")))
    assert not takes(found, block(call("weather", city="~Paris")))
    assert not takes(found, block(call("weather", city="~Paris", days="3", unit="~rankine")))
    assert not takes(found, block())
    assert not takes(found, "Well. " + block(good)[:-3])


def test_a_mark_of_calls_stands_in_tags_alone(preparer: Preparer) -> None:
    """Elsewhere it would reach the client as text."""
    found = grammar(preparer, "chat", tools())
    for text in (
        "｜",
        "a｜DSM｜L",
        "｜｜DSML",
        "中文｜标题 <b> </",
        "｜D｜DS｜DSM｜DSML",
        "<｜DSML",
    ):
        assert takes(found, text), text
        assert takes(found, text + "\n\n" + block(call("time"))), text
        assert takes(found, block(call("weather", city=f"~{text}", days="3"))), text
    for text in (
        "｜DSML｜",
        "a ｜DSML｜ b",
        "｜D｜DSML｜",
        "｜DSM｜DSML｜",
        "<｜DSML｜ b",
        "</｜DSML｜ calls>",
    ):
        assert not takes(found, text), text
        assert not takes(found, text + block(call("time"))), text
        assert not takes(found, block(call("weather", city=f"~{text}", days="3"))), text


def test_text_arguments_may_hold_anything_but_their_end(preparer: Preparer) -> None:
    found = grammar(preparer, "chat", tools())
    for city in ('Saint-Denis <La Réunion>\nrue "5" & co', "</b> {}", "｜DSML"):
        assert takes(found, block(call("weather", city=f"~{city}", days="3"))), city


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_call_can_be_forced(preparer: Preparer, choice: object, thinking: bool) -> None:
    """With thinking the model opens the block itself, behind its thoughts."""
    change = tools(tool_choice=choice) | ({} if thinking else PLAIN)
    made = generation(preparer, "chat", change)
    assert made.grammar is not None
    assert made.grammar.kind == "calls"
    begin = "\n\n<｜DSML｜ calls>\n" if thinking else ""
    prompt = TOKENIZER.decode(unpack_ids(made.prompt_ids).tolist(), skip_special_tokens=False)
    assert prompt.endswith("<think>" if thinking else "<｜DSML｜ calls>\n")
    end = "</｜DSML｜ calls>"
    assert takes(made.grammar, begin + call("time") + end)
    assert not takes(made.grammar, "Just an answer.")
    weather = begin + call("weather", city="~Paris", days="3") + end
    assert takes(made.grammar, weather) == (choice == "required")
    assert bool(made.grammar.start_after) == thinking


def test_one_call_at_a_time(preparer: Preparer) -> None:
    found = grammar(preparer, "chat", tools(parallel_tool_calls=False))
    assert takes(found, block(call("time")))
    assert not takes(found, block(call("time"), call("time")))


def test_allowed_tools(preparer: Preparer) -> None:
    listed = [{"type": "function", "function": {"name": "time"}}]
    for mode, kind in (("auto", "tools"), ("required", "calls")):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}
        found = grammar(preparer, "chat", tools(tool_choice=choice))
        assert found.kind == kind
        begin = "\n\n" if mode == "required" else ""
        assert takes(found, begin + block(call("time")))
        assert not takes(found, begin + block(call("weather", city="~Paris", days="3")))


def test_no_tools_no_grammar(preparer: Preparer) -> None:
    assert generation(preparer, "chat", tools(tool_choice="none")).grammar is None
    assert generation(preparer, "chat", {}).grammar is None


def test_anthropics_any(preparer: Preparer) -> None:
    listed = [{"name": "weather", "input_schema": WEATHER}]
    for kind in ("any", "tool"):
        choice = {"type": kind, **({"name": "weather"} if kind == "tool" else {})}
        found = grammar(preparer, "messages", {"tools": listed, "tool_choice": choice})
        good = call("weather", city="~Paris", days="3")
        begin = "" if takes(found, block(good)[len("<｜DSML｜ calls>\n") :]) else "\n\n"
        whole = block(good) if begin else block(good)[len("<｜DSML｜ calls>\n") :]
        assert takes(found, begin + whole)
        assert not takes(found, "No.")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    found = grammar(preparer, "messages", {"tools": listed, "tool_choice": choice})
    assert not takes(found, block(good, good))


def test_strings_with_a_shape_go_as_json(preparer: Preparer) -> None:
    schema = {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}$"}},
        "required": ["code"],
    }
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    found = grammar(preparer, "chat", {"tools": [tool]})
    assert takes(found, block(call("f", code='"FR"')))
    assert not takes(found, block(call("f", code='"fr"')))
    assert not takes(found, block(call("f", code="~FR")))


def test_local_references_of_a_tool_are_followed(preparer: Preparer) -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    found = grammar(preparer, "chat", {"tools": [tool]})
    assert takes(found, block(call("f", at="[1, 2]")))
    assert not takes(found, block(call("f", at="[1, 2, 3]")))


def test_strict_tools_are_kept_to_or_refused(preparer: Preparer) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    found = refusal(preparer, "chat", {"tools": [{"type": "function", "function": function}]})
    assert found.param == "tools[0].function.parameters.properties.a.not"
    function["strict"] = False  # then nobody was promised anything
    loose = grammar(preparer, "chat", {"tools": [{"type": "function", "function": function}]})
    assert takes(loose, block(call("f", a="{}")))


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", tools(tool_choice="sometimes")),
        ("tool_choice", tools(tool_choice={"type": "function", "function": {"name": "x"}})),
        ("tool_choice.type", tools(tool_choice={"type": "custom"})),
        ("tool_choice.tools", tools(tool_choice={"type": "allowed_tools", "tools": []})),
        ("guided_json", tools(tool_choice="required", guided_json=PERSON)),
        ("guided_regex", tools(guided_regex="a")),
    ],
)
def test_faults_of_the_choice(preparer: Preparer, param: str, change: Json) -> None:
    assert refusal(preparer, "chat", change).param == param


def test_an_answer_in_a_format_or_calls(preparer: Preparer) -> None:
    found = grammar(preparer, "chat", tools(guided_json=PERSON))
    assert takes(found, '{"name": "Ada", "age": 36}')
    assert takes(found, "\n\n" + block(call("time")))
    assert not takes(found, "Just an answer.")


def test_every_grammar_of_tools_compiles(preparer: Preparer) -> None:
    schemas = (
        WEATHER,
        PERSON,
        None,
        {"type": "object", "properties": {}},
        {"type": "object", "anyOf": [WEATHER]},
    )
    names = ("a", "b-c", "d_e", "x1", "y2")
    listed = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in zip(names, schemas, strict=True)
    ]
    found = grammar(preparer, "chat", {"tools": listed})
    assert problem_of(found) == ""
    assert takes(found, block(*(call(name, q="~x") for name in names[2:])))
