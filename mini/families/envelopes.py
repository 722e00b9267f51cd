"""How a text reaches the model: bare, as a mail, a chat, a record with other fields; typed well or badly."""

import random
from typing import Any

from mini.families import grammar

_OPENERS = ("Hi,", "Hello,", "Dear team,", "Good morning,", "hey", "Hi there,", "To whom it may concern,")
_CLOSERS = (
    "Regards, {name}",
    "Thanks, {name}",
    "Best wishes, {name} {surname}",
    "{name}",
    "Sent from my phone",
    "Kind regards",
)
_ASIDES = (
    "Reference {code}.",
    "Written at {time}.",
    "(Entry {num} of the log.)",
    "Forwarded by {name} {surname}.",
    "File {code}, page {num}.",
    "This is message {num}{num} in the archive.",
    "Received on {day}, {time}.",
)
_FIELDS: dict[str, tuple[str, ...]] = {
    "id": ("{code}", "{num}{num}{num}"),
    "received": ("{day} {time}", "2026-0{num}", "{month} {num}"),
    "channel": ("web", "mail", "phone", "chat", "app"),
    "reader": ("{name}", "{name} {surname}"),
    "language_setting": ("en", "auto"),
    "attachments": ("0", "1", "2"),
    "office": ("{city}",),
    "version": ("{num}.{num}",),
}
_BODY = ("text", "body", "content", "message", "input", "note")


def plain(draw: random.Random, text: str) -> str:
    """The text itself, sometimes mistyped, lower-cased or shouted."""
    roll = draw.random()
    if roll < 0.06:
        return text.lower()
    if roll < 0.08:
        return text.upper()
    if roll < 0.16:
        return mistyped(draw, text)
    return text


def wrap(draw: random.Random, text: str, noun: str = "text") -> Any:
    """A state that carries the text, with things around it that do not change the answer."""
    text = plain(draw, text)
    roll = draw.random()
    if roll < 0.45:
        return text
    if roll < 0.55:
        opener, closer = draw.choice(_OPENERS), grammar.fill(draw, draw.choice(_CLOSERS))
        return draw.choice((f"{opener}\n\n{text}\n\n{closer}", f"{opener} {text} {closer}", f"{text}\n{closer}"))
    if roll < 0.63:
        aside = grammar.fill(draw, draw.choice(_ASIDES))
        return f"{aside} {text}" if draw.random() < 0.5 else f"{text}\n\n{aside}"
    if roll < 0.70:
        who = draw.choice(("User", "Customer", "Sender", "A", "Client"))
        return f"{who}: {text}"
    if roll < 0.94:
        names = draw.sample(sorted(_FIELDS), draw.randint(0, 4))
        fields: dict[str, Any] = {name: grammar.fill(draw, draw.choice(_FIELDS[name])) for name in names}
        key = noun.replace(" ", "_") if draw.random() < 0.4 else draw.choice(_BODY)
        fields[key] = text
        shuffled = draw.sample(sorted(fields), len(fields))
        record = {name: fields[name] for name in shuffled}
        return record if draw.random() < 0.8 else {"item": record}
    return [text]


def several(draw: random.Random, texts: list[str]) -> Any:
    """A state that carries several texts in the order given."""
    texts = [plain(draw, text) for text in texts]
    style = draw.randrange(4)
    if style == 0:
        return texts
    if style == 1:
        return "\n".join(f"{i + 1}. {text}" for i, text in enumerate(texts))
    if style == 2:
        return {f"{i + 1}": text for i, text in enumerate(texts)}
    return "\n---\n".join(texts)


def mistyped(draw: random.Random, text: str) -> str:
    """The text with one letter in forty swapped, dropped or doubled; digits stay."""
    letters = list(text)
    for _ in range(max(1, len(letters) // 40)):
        i = draw.randrange(len(letters))
        if letters[i].isalpha():
            letters[i] = draw.choice(("", letters[i] * 2, draw.choice("aeiorstn")))
    return "".join(letters)
