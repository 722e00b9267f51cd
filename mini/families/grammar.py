"""A small language for sentences with many shapes.

`[red|blue] {product}` stands for a choice between two words and then any product of the word lists; an empty
alternative, as in `[very|] good`, may leave a word out. Each `{slot}` is drawn anew, without repeating what the same
sentence already used where the list allows it.
"""

import random
import re
from functools import cache
from pathlib import Path

BANKS = Path(__file__).with_name("banks")
_ALTERNATIVES = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_SLOT = re.compile(r"\{([a-z_]+)\}")


@cache
def words() -> dict[str, list[str]]:
    """The word lists by slot name."""
    lines = (BANKS / "words.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split(" = ", 1) for line in lines if line.strip())
    return {name: values.split(", ") for name, values in rows}


def fill(draw: random.Random, template: str) -> str:
    """One sentence of a template."""
    while _ALTERNATIVES.search(template):
        template = _ALTERNATIVES.sub(lambda found: draw.choice(found[1].split("|")), template)
    used: dict[str, set[str]] = {}

    def word(found: re.Match[str]) -> str:
        name = found[1]
        values = words().get(name)
        if values is None:
            return found[0]
        fresh = [value for value in values if value not in used.setdefault(name, set())]
        chosen = draw.choice(fresh or values)
        used[name].add(chosen)
        return chosen

    text = _SLOT.sub(word, template).replace("\\n", "\n")
    return re.sub(r" +", " ", text).replace(" ,", ",").replace(" .", ".").strip()


def say(draw: random.Random, templates: list[str]) -> str:
    """One sentence of one of the templates."""
    return fill(draw, draw.choice(templates))


def pick(draw: random.Random, slot: str, count: int = 1) -> list[str]:
    """Different words of one list."""
    return draw.sample(words()[slot], count)
