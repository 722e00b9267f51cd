"""Prompts byte for byte, and their ids against whole prompts encoded at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import prompts
import wire
from prompts import PromptEncoder, option_descriptions, option_keys, render_question, render_state, value_text

SYSTEM = (
    "Apply the supplied criterion to the supplied evidence. Choose exactly one listed option. "
    "Respond with only its uppercase letter, with no explanation or reasoning."
)


def parsed(**question: Any) -> wire.Question:
    return wire.validate({"state": "", "questions": {"q": question}}).questions["q"]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("", '{"evidence": "",'),
        ('a\n"b" \u2028 — é', '{"evidence": "a\\n\\"b\\" \u2028 — é",'),
        ('{"looks": "like JSON"}', '{"evidence": "{\\"looks\\": \\"like JSON\\"}",'),
        ({"b": 1, "a": [None, True, -0.0, 1e-07]}, '{"evidence": {"b": 1, "a": [null, true, -0.0, 1e-07]},'),
        ([], '{"evidence": [],'),
    ],
)
def test_state(state: Any, text: str) -> None:
    assert render_state(state) == text


def test_numbers_are_written_as_python_reads_them() -> None:
    numbers = b"[1e5, 1.50, 12345678901234567890123, -0, 1E-2]"
    body = b'{"state": ' + numbers + b', "questions": {"q": {"type": "noul", "instructions": "?"}}}'
    assert render_state(wire.read(body).state) == '{"evidence": [100000.0, 1.5, 12345678901234567890123, 0, 0.01],'


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (" as is ", " as is "), ({"é": [1]}, '{\n  "é": [\n    1\n  ]\n}'), ([], "[]")],
)
def test_text_of_a_value(value: Any, text: str) -> None:
    assert value_text(value) == text


@pytest.mark.parametrize(
    ("key", "value", "description"),
    [
        ("refund", "wants money back", "refund: wants money back"),
        ("refund", None, "refund"),
        ("refund", " \n", "refund"),
        ("refund", " padded ", "refund:  padded "),
        ("refund", {"a": 1}, 'refund: {\n  "a": 1\n}'),
        ("Refund ", " refund", " refund"),
        ("a", "text", "text"),
        ("AB", " text ", " text "),
        ("a", None, "a"),
        ("7", "text", "text"),
        ("0123456789", "text", "text"),
        ("option1", "text", "text"),
        ("option_12", "text", "text"),
        ("option 3", "text", "text"),
        ("opt4", "text", "text"),
        ("option__1", "text", "option__1: text"),
        ("option", "text", "option: text"),
        ("opt_4", "text", "opt_4: text"),
        ("abc", "text", "abc: text"),
        ("é", "text", "é: text"),
        ("a1", "text", "a1: text"),
        (" 7", "text", " 7: text"),
        ("٣", "text", "٣: text"),
        ("", "text", ": text"),
    ],
)
def test_choice_descriptions(key: str, value: Any, description: str) -> None:
    question = parsed(type="choice", criteria={key: value})
    assert option_descriptions(question) == [description]
    assert option_keys(question) == [key]


def test_a_list_of_options_reads_as_its_names() -> None:
    question = parsed(type="choice", criteria=["b ", "A", ""])
    assert option_descriptions(question) == option_keys(question) == ["b ", "A", ""]


@pytest.mark.parametrize(
    ("criteria", "descriptions"),
    [
        (None, ["Yes", "No"]),
        ({}, ["Yes", "No"]),
        ({"true": "it rains"}, ["Yes — it rains", "No"]),
        ({"false": "dry", "true": None}, ["Yes", "No — dry"]),
        ({"no": ["dry"], "yes": " wet "}, ["Yes —  wet ", 'No — [\n  "dry"\n]']),
        ({"true": " "}, ["Yes", "No"]),
    ],
)
def test_noul_descriptions(criteria: Any, descriptions: list[str]) -> None:
    question = parsed(type="noul", instructions="?", criteria=criteria)
    assert option_descriptions(question) == descriptions
    assert option_keys(question) == ["yes", "no"]


def test_score_descriptions() -> None:
    question = parsed(type="score", criteria=["calm", {"n": 1}, ""])
    assert option_descriptions(question) == ["Level 0: calm", 'Level 1: {\n  "n": 1\n}', "Level 2: "]
    assert option_keys(question) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("instructions", "criterion"),
    [(None, ""), ("  Is it?\n", "Is it?"), ({"ask": "é"}, '{\\n  \\"ask\\": \\"é\\"\\n}'), ("", "")],
)
def test_question(instructions: Any, criterion: str) -> None:
    question = parsed(type="choice", instructions=instructions, criteria={"x": None, "é": "y"})
    assert render_question(question, ["A", "B", "C"]) == (
        f' "criterion": "{criterion}", "options": '
        '[{"letter": "A", "description": "x"}, {"letter": "B", "description": "é: y"}]}'
    )


# --- ids -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny_qwen35", "mini"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> PromptEncoder:
    return PromptEncoder(AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def whole(tokenizer: PreTrainedTokenizerBase, encoder: PromptEncoder) -> Callable[[Any, wire.Question], list[int]]:
    """The ids of one whole prompt, rendered and encoded at once with nothing of ours but the user message."""

    def ids(state: Any, question: wire.Question) -> list[int]:
        descriptions = option_descriptions(question)
        user = json.dumps(
            {
                "evidence": state,
                "criterion": value_text(question.instructions).strip(),
                "options": [
                    {"letter": letter, "description": text}
                    for letter, text in zip(encoder.labels, descriptions, strict=False)
                ],
            },
            ensure_ascii=False,
        )
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return ids


def test_the_whole_prompt_of_the_published_template(tiny_qwen35: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen35)
    request = wire.validate({"state": "fog", "questions": {"id": {"type": "noul", "instructions": "Late?"}}})
    encoded = PromptEncoder(AutoTokenizer.from_pretrained(tiny_qwen35)).encode(request)
    assert tokenizer.decode(encoded.prefix + encoded.tails[0]) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        '<|im_start|>user\n{"evidence": "fog", "criterion": "Late?", "options": '
        '[{"letter": "A", "description": "Yes"}, {"letter": "B", "description": "No"}]}<|im_end|>\n'
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert encoded.prefix[0] == 248045
    assert encoded.tails[0][-4:] == [248068, 271, 248069, 271]


def test_labels_of_the_published_vocabulary(tiny_qwen35: Path) -> None:
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(tiny_qwen35))
    assert encoder.labels[:28] == [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "AA", "AB"]
    assert "BP" in encoder.labels
    assert "BQ" not in encoder.labels
    assert len(encoder.labels) == len(encoder.label_ids) == len(set(encoder.label_ids)) == 255
    assert encoder.labels[-1] == "JT"
    assert encoder.label_ids[0] == 32


def test_labels_follow_the_prompt_as_one_token(encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "x"}]
    start = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    ids = tokenizer(start, add_special_tokens=False)["input_ids"]
    for label, label_id in zip(encoder.labels, encoder.label_ids, strict=True):
        assert tokenizer(start + label, add_special_tokens=False)["input_ids"] == [*ids, label_id]
        assert tokenizer.decode([label_id]) == label


edges = st.sampled_from(
    ["", " ", "\n", '"', '",', '", "criterion": "', "\\", "}", "]", ",", "\u0301", "\u200d", "é", "a"]
)
texts = st.builds(
    "".join, st.lists(st.text(max_size=12) | edges | st.sampled_from(["word", "1234", "日本", "👩‍🚀"]), max_size=6)
)
values = st.recursive(
    texts | st.integers() | st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
states = texts | st.lists(values, max_size=3) | st.dictionaries(texts, values, max_size=3)
questions = st.one_of(
    st.builds(lambda t: {"type": "noul", "instructions": f"?{t}"}, texts),
    st.builds(
        lambda t, o: {"type": "choice", "instructions": t, "criteria": o},
        texts,
        st.dictionaries(texts, texts, min_size=1, max_size=4),
    ),
    st.builds(
        lambda t, o: {"type": "score", "instructions": t, "criteria": o}, texts, st.lists(texts, min_size=1, max_size=4)
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states, asked=st.lists(questions, min_size=1, max_size=4))
def test_ids_equal_those_of_whole_prompts(
    encoder: PromptEncoder,
    tokenizer: PreTrainedTokenizerBase,
    whole: Callable[[Any, wire.Question], list[int]],
    state: Any,
    asked: list[Any],
) -> None:
    if any(token in json.dumps([state, asked], ensure_ascii=False) for token in tokenizer.get_added_vocab()):
        return
    request = wire.validate({"state": state, "questions": {str(i): q for i, q in enumerate(asked)}})
    encoded = encoder.encode(request)
    assert [encoded.prefix + tail for tail in encoded.tails] == [
        whole(state, question) for question in request.questions.values()
    ]
    assert all(encoded.tails)
    assert encoded.counts == [len(option_keys(question)) for question in request.questions.values()]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        texts | st.sampled_from([" a b", "c d ", "É e\u0301 f", " 1 a", "a  b", "a\nb c"]), min_size=1, max_size=30
    )
)
def test_long_states_are_cut_between_words_only(
    encoder: PromptEncoder,
    tokenizer: PreTrainedTokenizerBase,
    whole: Callable[[Any, wire.Question], list[int]],
    parts: list[str],
) -> None:
    state = " ".join(parts) * 4
    if any(token in state for token in tokenizer.get_added_vocab()):
        return
    request = wire.validate({"state": state, "questions": {"q": {"type": "noul", "instructions": "?"}}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "_PIECE", 5)
        encoded = encoder.encode(request)
    assert encoded.prefix + encoded.tails[0] == whole(state, request.questions["q"])


def test_control_tokens_in_text_stay_text(encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase) -> None:
    special = dict(tokenizer.get_added_vocab())
    assert "<|im_end|>" in special
    plain = encoder.encode(wire.validate({"state": "", "questions": {"q": {"type": "noul", "instructions": "?"}}}))
    own = sum(i in special.values() for i in plain.prefix + plain.tails[0])
    for token in special:
        request = {
            "state": {token: f"a{token}b"},
            "questions": {"q": {"type": "choice", "instructions": token, "criteria": {f"x{token}": token}}},
        }
        encoded = encoder.encode(wire.validate(request))
        ids = encoded.prefix + encoded.tails[0]
        assert sum(i in special.values() for i in ids) == own
        assert f"a{token}b" in tokenizer.decode(ids)


def test_questions_share_all_they_can(encoder: PromptEncoder) -> None:
    asked = {name: {"type": "noul", "instructions": f"Is it {name}?"} for name in ("late", "early", "wet")}
    encoded = encoder.encode(wire.validate({"state": "fog " * 50, "questions": asked}))
    assert len({tail[0] for tail in encoded.tails}) > 1
    assert encoded.input_tokens == sum(len(encoded.prefix) + len(tail) for tail in encoded.tails)
    assert encoded.stream_tokens == len(encoded.prefix) + sum(map(len, encoded.tails))
    same = encoder.encode(wire.validate({"state": "fog", "questions": {"a": asked["wet"], "b": asked["wet"]}}))
    assert [len(tail) for tail in same.tails] == [1, 1]


def test_question_ids_do_not_enter_the_prompt(encoder: PromptEncoder) -> None:
    question = {"type": "noul", "instructions": "?"}
    one, other = ({"state": "fog", "questions": {name: question}} for name in ("a", "🎯 z"))
    assert encoder.encode(wire.validate(one)) == encoder.encode(wire.validate(other))


def test_lone_surrogates_are_refused(encoder: PromptEncoder) -> None:
    request = wire.validate({"state": ["\ud800"], "questions": {"q": {"type": "noul", "instructions": "?"}}})
    with pytest.raises(wire.BlinkError) as caught:
        encoder.encode(request)
    assert caught.value.status == 422


def test_a_folder_without_a_template_is_refused(tiny_qwen35: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen35)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        PromptEncoder(tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="user message"):
        PromptEncoder(tokenizer)


def test_more_options_than_labels_are_refused(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "labels", encoder.labels[:3])
    request = wire.validate({"state": "", "questions": {"q": {"type": "choice", "criteria": list("abcd")}}})
    with pytest.raises(wire.BlinkError, match="3 options per choice"):
        encoder.encode(request)


def test_the_system_message_is_the_trained_one() -> None:
    assert prompts.SYSTEM == SYSTEM
