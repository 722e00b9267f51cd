"""A question becomes a prompt: the text that the weights were trained on, and its token ids.

Every string marked as an interface constant is exact: change one and the answers change.
"""

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Any

from transformers import PreTrainedTokenizerBase

import wire
from wire import LIMITS

# Interface constants.
SYSTEM = (
    "Apply the supplied criterion to the supplied evidence. Choose exactly one listed option. "
    "Respond with only its uppercase letter, with no explanation or reasoning."
)
_GENERIC_KEY = re.compile(r"[A-Za-z]{1,2}|[0-9]+|option[_ ]?[0-9]+|opt[0-9]+")
_ASIDE = " — "

_PIECE = 512  # characters of a long state that one thread tokenizes
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")

# --- question -> text ------------------------------------------------------------------------------------------------


def value_text(value: Any) -> str:
    """A criterion as text: a string as it is, null as nothing, other JSON indented by two with raw non-ASCII."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)


def option_keys(question: wire.Question) -> list[str]:
    """The names of the options in label order."""
    match question:
        case wire.Choice():
            return list(question.criteria)
        case wire.Noul():
            return ["yes", "no"]
        case wire.Score():
            return [str(level) for level in range(len(question.criteria))]


def option_descriptions(question: wire.Question) -> list[str]:
    """What the model reads for each option, in label order (interface constants)."""
    match question:
        case wire.Choice():
            return [_described(key, value_text(value)) for key, value in question.criteria.items()]
        case wire.Noul():
            sides = (question.criteria.yes, question.criteria.no) if question.criteria else (None, None)
            texts = [value_text(side) for side in sides]
            return [
                f"{name}{_ASIDE}{text}" if text.strip() else name
                for name, text in zip(("Yes", "No"), texts, strict=True)
            ]
        case wire.Score():
            return [f"Level {i}: {value_text(level)}" for i, level in enumerate(question.criteria)]


def _described(key: str, text: str) -> str:
    if not text.strip():
        return key
    if _GENERIC_KEY.fullmatch(key) or key.strip().casefold() == text.strip().casefold():
        return text
    return f"{key}: {text}"


def render_state(state: Any) -> str:
    """The opening of the user message, up to and with the comma that follows the evidence.

    The tokenizers in use always cut after that comma, so the rest can be encoded apart.
    """
    return '{"evidence": ' + json.dumps(state, ensure_ascii=False, allow_nan=False) + ","


def render_question(question: wire.Question, labels: Sequence[str]) -> str:
    """The rest of the user message: the criterion and the lettered options."""
    descriptions = option_descriptions(question)
    rest = {
        "criterion": value_text(question.instructions).strip(),
        "options": [
            {"letter": letter, "description": text}
            for letter, text in zip(labels[: len(descriptions)], descriptions, strict=True)
        ],
    }
    return " " + json.dumps(rest, ensure_ascii=False)[1:]


# --- text -> token ids -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompts:
    """One request as token ids: what its questions share, and each question's own tail of at least one id."""

    prefix: list[int]
    tails: list[list[int]]
    counts: list[int]
    """Offered options of each question; their labels are the first that many of the engine's."""

    @property
    def input_tokens(self) -> int:
        """Tokens of all whole prompts."""
        return len(self.prefix) * len(self.tails) + sum(map(len, self.tails))

    @property
    def stream_tokens(self) -> int:
        """Tokens that are read when the prefix is read once."""
        return len(self.prefix) + sum(map(len, self.tails))


class PromptEncoder:
    """Renders and tokenizes requests with a model folder's own chat template. Safe to call from many threads.

    Request text never becomes a control token: only the template's own markers do.

    Raises:
        ValueError: the tokenizer or its template cannot carry the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        marker = "{blink}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": marker}]
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert isinstance(rendered, str)
        if rendered.count(marker) != 1:
            raise ValueError("the chat template does not carry the user message once, as it is")
        head, foot = rendered.split(marker)

        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._head, self._foot = self._encode([head, foot])
        self.labels, self.label_ids = self._find_labels(foot)
        whole = self._whole_prompts(head, foot)
        self.root = _common_start([ids for _, ids in whole])
        """The ids that prompts usually begin with: the system message and the opening of the user's."""

        # From here on every added token in request text is read as the characters it is made of.
        self._tokenizer.add_special_tokens(list(self._tokenizer.get_added_tokens_decoder().values()))
        self._tokenizer.encode_special_tokens = True
        for request, ids in whole:
            prompts = self.encode(request)
            if prompts.prefix + prompts.tails[0] != ids:
                raise ValueError("the tokenizer joins text across borders at which blink cuts prompts")

    def encode(self, request: wire.DecisionRequest) -> Prompts:
        """Token ids of every question's prompt, the state encoded once.

        Raises:
            BlinkError: text that is not valid Unicode, or more options than the tokenizer has labels.
        """
        for name, question in request.questions.items():
            if isinstance(question, wire.Choice) and len(question.criteria) > len(self.labels):
                message = f"This model has labels for {len(self.labels)} options per choice"
                raise wire.violation("too_long", ["body", "questions", name, "choice", "criteria"], message)
        pieces = _pieces(render_state(request.state))
        texts = pieces + [render_question(question, self.labels) for question in request.questions.values()]
        try:
            for text in texts:
                text.encode("utf-8")  # strings of a library caller may hold lone surrogates
        except UnicodeEncodeError:
            raise wire.violation("string_unicode", ["body"], "Text should be valid Unicode") from None
        encoded = self._encode(texts)
        state = list(chain.from_iterable(encoded[: len(pieces)]))
        tails = [tail + self._foot for tail in encoded[len(pieces) :]]
        common = _common_length(tails) if len(tails) > 1 else 0
        counts = [len(option_keys(question)) for question in request.questions.values()]
        return Prompts(self._head + state + tails[0][:common], [tail[common:] for tail in tails], counts)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _find_labels(self, foot: str) -> tuple[list[str], list[int]]:
        """The first labels, A to Z and then AA to ZZ, that are one token of their own right after the prompt."""
        letters = string.ascii_uppercase
        candidates = [*letters, *("".join(pair) for pair in product(letters, repeat=2))]
        labels, ids = [], []
        for label, encoded in zip(candidates, self._encode([foot + label for label in candidates]), strict=True):
            if encoded[:-1] == self._foot and self._tokenizer.decode(encoded[-1:]) == label:
                labels.append(label)
                ids.append(encoded[-1])
        if len(labels) < LIMITS.levels:
            raise ValueError(f"the tokenizer has only {len(labels)} labels that are one token after the prompt")
        return labels[: LIMITS.options], ids[: LIMITS.options]

    def _whole_prompts(self, head: str, foot: str) -> list[tuple[wire.DecisionRequest, list[int]]]:
        """Sample requests with the ids of their whole rendered prompt encoded at once."""
        question = {"type": "noul", "instructions": "Is it late?"}
        samples = []
        long = ["The last train left.", "naïve — 備考\n"] * (_PIECE // 20)
        for state in ("", "The last train left. ", ["a", 1], {"note": "naïve — 備考\n", "n": -0.5}, long):
            request = wire.validate({"state": state, "questions": {"q": question}})
            body = render_state(state) + render_question(request.questions["q"], self.labels)
            samples.append((request, self._encode([head + body + foot])[0]))
        return samples


def check_length(request: wire.DecisionRequest, prompts: Prompts, context: int) -> None:
    """See that every question's whole prompt fits into `context` tokens.

    Raises:
        BlinkError: one does not, naming the first.
    """
    for name, tail in zip(request.questions, prompts.tails, strict=True):
        tokens = len(prompts.prefix) + len(tail)
        if tokens > context:
            message = f"{tokens} tokens exceed the maximum context length of {context} tokens"
            raise wire.violation("max_tokens_exceeded", ["body", "questions", name], message)


SMALL_QUESTIONS: Mapping[str, Any] = {
    "kind": {"type": "choice", "instructions": "What is it about?", "criteria": ["a gate", "a boat", "a bill"]},
    "open": {"type": "noul", "instructions": "Was the gate open?"},
    "urgency": {"type": "score", "instructions": "How urgent is it?", "criteria": ["can wait", "today", "now"]},
}


def small_request(names: Iterable[str] = tuple(SMALL_QUESTIONS)) -> wire.DecisionRequest:
    """A request to warm up with and to compare engines by."""
    questions = {name: SMALL_QUESTIONS[name] for name in names}
    return wire.validate({"state": "The gate was left open overnight, and a boat is gone.", "questions": questions})


def _pieces(text: str) -> list[str]:
    """Cut a long text between words, where tokenizers cut anyway, so that threads can share it."""
    cuts = [0]
    while cut := _BETWEEN_WORDS.search(text, cuts[-1] + _PIECE):
        cuts.append(cut.start())
    return [text[start:stop] for start, stop in pairwise([*cuts, len(text)])]


def _common_start(sequences: Sequence[list[int]]) -> list[int]:
    return sequences[0][: _common_length(sequences)]


def _common_length(tails: Sequence[Sequence[int]]) -> int:
    """Leading ids that all tails share, leaving each at least one of its own."""
    shortest = min(map(len, tails)) - 1
    first = tails[0]
    return next((i for i in range(shortest) if any(tail[i] != first[i] for tail in tails)), shortest)
