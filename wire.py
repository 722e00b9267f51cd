"""The API contract of `POST /v1/systemone`: typed requests, typed answers, limits and error bodies.

JSON comes in as bytes and leaves as a checked `DecisionRequest`, or as a `BlinkError` that carries the status and the
body the client gets. Nothing here knows about models or sockets.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

TEXT_ONLY = "this model reads text only"
_INLINE_IMAGE = re.compile(r"data:image/[^,]{1,200};base64", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; anything beyond is refused, never truncated."""

    questions: int = 512
    options: int = 255
    levels: int = 10
    nesting: int = 64
    tokens_per_question: int = 131_072
    violations_listed: int = 20


LIMITS = Limits()


class BlinkError(Exception):
    """A request that gets no answer, with everything the wire says about it.

    Args:
        message: one line for a person; becomes the body's `error`.
        detail: the body's `detail`: a list of `{type, loc, msg}` for 400 and 422, else `{error_type, message}`.
        status: the HTTP status.
        headers: further response headers.
    """

    def __init__(
        self,
        message: str,
        detail: Sequence[Mapping[str, Any]] | Mapping[str, str],
        *,
        status: int = 422,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.status = status
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.message, "detail": self.detail}


def violation(kind: str, loc: Sequence[str | int], msg: str, *, status: int = 422) -> BlinkError:
    """An error about one place in the request; `loc` starts with "body"."""
    return _violations([{"type": kind, "loc": list(loc), "msg": msg}], status=status)


def refusal(status: int, error_type: str, message: str, **headers: str) -> BlinkError:
    """An error that is not about a place in the body; keyword `Retry_After="1"` becomes the header `Retry-After`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return BlinkError(message, {"error_type": error_type, "message": message}, status=status, headers=named)


def busy(message: str) -> BlinkError:
    return refusal(503, "overloaded_error", message, Retry_After="1")


def _violations(rows: list[dict[str, Any]], *, status: int = 422) -> BlinkError:
    listed = rows[: LIMITS.violations_listed]
    lines = []
    for row in listed:
        place = ".".join(str(part) for part in row["loc"][1:])
        place = place if len(place) <= 200 else place[:200] + "..."  # ids have no bound of their own
        lines.append(f"{place}: {row['msg']}" if place else row["msg"])
    if len(rows) > len(listed):
        lines.append(f"and {len(rows) - len(listed)} more")
    return BlinkError("; ".join(lines), listed, status=status)


# --- values ----------------------------------------------------------------------------------------------------------


def _content(value: Any) -> Any:
    if isinstance(value, (str, dict, list)):
        return value
    raise PydanticCustomError("json_content", "Input should be a string, an object or an array")


def _bounded(value: Any) -> Any:
    """Refuse nesting beyond the limit and numbers that JSON cannot carry, without recursion."""
    level: list[Any] = [value]
    depth = 1  # the body's own object encloses every field
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise PydanticCustomError("finite_number", "Numbers should be finite")
        if any(isinstance(item, (dict, list)) for item in level):
            depth += 1
        if depth > LIMITS.nesting:
            raise PydanticCustomError("too_deep", f"Nesting should not exceed {LIMITS.nesting} levels")
        level = inner
    return value


def _strings(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _text_state(state: Any) -> Any:
    if any(_INLINE_IMAGE.search(text) for text in _strings(state)):
        raise PydanticCustomError("text_only", TEXT_ONLY)
    return state


def _no_images(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError("text_only", TEXT_ONLY)


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _question_id(name: str) -> str:
    if not name:
        raise PydanticCustomError("empty_id", "A question id should not be empty")
    return name


def _few_questions(value: Any) -> Any:
    if isinstance(value, dict):
        if not value:
            raise PydanticCustomError("too_short", "A request should have at least 1 question")
        if len(value) > LIMITS.questions:
            raise PydanticCustomError("too_long", f"A request takes at most {LIMITS.questions} questions")
    return value


def _options(value: Any) -> Any:
    """Accept a list of names as options without descriptions, and bound the number of options."""
    if isinstance(value, (dict, list)):
        if not value:
            raise PydanticCustomError("too_short", f"At least 1 and at most {LIMITS.options} options per choice")
        if len(value) > LIMITS.options:
            raise PydanticCustomError("too_long", f"At most {LIMITS.options} options per choice")
    if not isinstance(value, list):
        return value
    for i, name in enumerate(value):
        if not isinstance(name, str):
            raise PydanticCustomError("string_type", f"Option {i} of a list should be a string")
    if len(set(value)) < len(value):
        raise PydanticCustomError("duplicate_option", "Option names in a list should differ")
    return dict.fromkeys(value)


def _levels(value: Any) -> Any:
    if isinstance(value, list) and not 1 <= len(value) <= LIMITS.levels:
        kind = "too_short" if not value else "too_long"
        raise PydanticCustomError(kind, f"a score takes 2 to {LIMITS.levels} levels")
    return value


Content = Annotated[Any, BeforeValidator(_content, json_schema_input_type=str | dict[str, Any] | list[Any])]

# What validators above check, as JSON Schema says it: only the documentation reads these.
_MANY_OPTIONS = {"minProperties": 1, "maxProperties": LIMITS.options}
_Options = (
    Annotated[dict[str, Content | None], Field(json_schema_extra=_MANY_OPTIONS)]
    | Annotated[list[str], Field(min_length=1, max_length=LIMITS.options, json_schema_extra={"uniqueItems": True})]
)
_MANY_QUESTIONS: dict[str, Any] = {
    "minProperties": 1,
    "maxProperties": LIMITS.questions,
    "propertyNames": {"minLength": 1},
}
_NOT_BLANK = r"[^\s\x1c-\x1f\x85]"  # what `str.strip` leaves; elsewhere `\s` knows fewer characters
_SOMETHING: dict[str, Any] = {
    "anyOf": [{"type": "string", "pattern": _NOT_BLANK}, {"type": "object"}, {"type": "array"}]
}


def _one_of(*names: str, schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"required": [name], "properties": {name: schema}} for name in names]


_JUDGED: dict[str, Any] = {"type": "object", "anyOf": _one_of("true", "false", schema=_SOMETHING)}
_HAS_SOMETHING_TO_JUDGE: dict[str, Any] = {
    "anyOf": [*_one_of("instructions", schema=_SOMETHING), *_one_of("criteria", schema=_JUDGED)]
}


# --- the request -----------------------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)


class _Question(_Strict):
    instructions: Content | None = None
    """What is asked."""


class NoulCriteria(_Strict):
    """What a yes and a no mean; `yes` and `no` are accepted as other names of `true` and `false`."""

    yes: Content | None = Field(default=None, validation_alias=AliasChoices("true", "yes"))
    """When the answer is yes."""
    no: Content | None = Field(default=None, validation_alias=AliasChoices("false", "no"))
    """When the answer is no."""


class Noul(_Question):
    """A yes/no question."""

    model_config = ConfigDict(json_schema_extra=_HAS_SOMETHING_TO_JUDGE)

    type: Literal["noul"]
    criteria: NoulCriteria | None = None
    """May stand in place of instructions."""

    @model_validator(mode="after")
    def _has_something_to_judge(self) -> "Noul":
        sides = (self.criteria.yes, self.criteria.no) if self.criteria else ()
        if all(_blank(part) for part in (self.instructions, *sides)):
            raise PydanticCustomError("nothing_to_judge", "A noul should have instructions or criteria")
        return self


class Choice(_Question):
    """One of several named options, in the order of the request; a null description leaves the name to speak."""

    type: Literal["choice"]
    criteria: Annotated[dict[str, Content | None], BeforeValidator(_options, json_schema_input_type=_Options)]
    """The options with their descriptions, or their names alone; at most 255."""


class Score(_Question):
    """A level on a scale, described from low to high; level i has the value i."""

    type: Literal["score"]
    criteria: Annotated[
        list[Content],
        BeforeValidator(_levels),
        Field(json_schema_extra={"minItems": 1, "maxItems": LIMITS.levels}),
    ]
    """The levels' descriptions, at most 10; an answer with one level is certain."""


Question = Annotated[Noul | Choice | Score, Field(discriminator="type")]


class DecisionRequest(_Strict):
    """One state and the questions about it, by id."""

    model: str = "jev-latest"
    """Any name is taken: a server has one model."""
    state: Annotated[Content, BeforeValidator(_bounded), AfterValidator(_text_state)]
    """What the questions are about: text, or JSON of at most 64 levels."""
    questions: Annotated[
        dict[Annotated[str, AfterValidator(_question_id)], Question],
        BeforeValidator(_bounded),
        BeforeValidator(_few_questions),
        Field(json_schema_extra=_MANY_QUESTIONS),
    ]
    """By id, at most 512."""
    images: Annotated[None, BeforeValidator(_no_images)] = None
    """Refused: the model reads text only."""
    assets: Annotated[None, BeforeValidator(_no_images)] = None
    """Refused, as images are."""


def validate(data: Any) -> DecisionRequest:
    """Check a decoded request.

    Raises:
        BlinkError: 400 if it is no object, else 422 with every violation up to the cap. No value is echoed.
    """
    if not isinstance(data, dict):
        raise violation("model_attributes_type", ["body"], "The body should be a JSON object", status=400)
    try:
        return DecisionRequest.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
    raise _violations([_row(entry) for entry in found])


def _row(entry: ErrorDetails) -> dict[str, Any]:
    kind, msg = entry["type"], entry["msg"]
    if kind == "union_tag_invalid":
        if entry["ctx"]["tag"] == "box":
            kind, msg = "text_only", TEXT_ONLY
        else:
            msg = "The question type should be 'choice', 'noul' or 'score'"
    elif kind == "union_tag_not_found":
        msg = "The question should have a 'type': 'choice', 'noul' or 'score'"
    loc = [part for part in entry["loc"] if part != "[key]"]
    return {"type": kind, "loc": ["body", *loc], "msg": msg}


def read(body: bytes) -> DecisionRequest:
    """Decode and check a request body.

    JSON is read strictly: UTF-8 only, no lone surrogates, no NaN or Infinity, integers of at most 4,300 digits. A byte
    order mark is skipped, of duplicate keys the last wins, and an empty body counts as an empty object.

    Raises:
        BlinkError: 400 for what is not JSON, else as `validate`.
    """
    body = body.removeprefix(b"\xef\xbb\xbf")
    try:
        data = from_json(body, allow_inf_nan=False) if body.strip() else {}
    except ValueError as error:  # says what and where, never the text itself
        raise violation("json_invalid", ["body"], f"The body is not valid JSON: {error}", status=400) from None
    return validate(data)


# --- the answer ------------------------------------------------------------------------------------------------------


Share = Annotated[float, Field(json_schema_extra={"minimum": 0, "maximum": 1})]


class _Answered(BaseModel):
    model_config = ConfigDict(json_schema_serialization_defaults_required=True, use_attribute_docstrings=True)


class NoulAnswer(_Answered):
    """The probability of yes."""

    type: Literal["noul"] = "noul"
    noul: Share


class ChoiceAnswer(_Answered):
    """The most probable option, and every option's probability in the order of the request."""

    type: Literal["choice"] = "choice"
    choice: str
    confidence: Share
    """1 is certain, 0 no better than a guess."""
    probabilities: dict[str, Share]
    """By option; they sum to 1."""


class ScoreAnswer(_Answered):
    """The mean level, and every level's description and probability; levels are counted from 0."""

    type: Literal["score"] = "score"
    score: float
    """The sum of every level times its probability."""
    confidence: Share
    """1 is certain, 0 no better than a guess."""
    legend: dict[str, Any]
    """The levels' descriptions, as sent."""
    probabilities: dict[str, Share]
    """By level; they sum to 1."""


Answer = NoulAnswer | ChoiceAnswer | ScoreAnswer


class Usage(_Answered):
    """Tokens: each question's whole prompt is counted; nothing is generated."""

    input_tokens: int
    output_tokens: int = 0


class DecisionResponse(_Answered):
    """One answer for each question."""

    model: str
    """The model that answered, whatever the request names."""
    answers: dict[str, Answer]
    """By the question's id."""
    usage: Usage


class ModelCard(BaseModel):
    """A model that is served."""

    name: str
    description: str
    release_date: str


class ModelList(BaseModel):
    """What is served: one model."""

    models: list[ModelCard]


# --- errors, as the documentation tells them -------------------------------------------------------------------------


class Violation(BaseModel):
    """One place in the request that is wrong; `loc` starts with "body"."""

    type: str
    loc: list[str | int]
    msg: str


class Refusal(BaseModel):
    """Why there is no answer, for anything but a place in the body."""

    error_type: str
    message: str


class ViolationsError(BaseModel):
    """The body of 400 and 422."""

    error: str
    detail: list[Violation]


class RefusalError(BaseModel):
    """The body of every other error."""

    error: str
    detail: Refusal
