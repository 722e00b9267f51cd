"""Write `docs/api.md`, the description of the API for people, from the one that servers give: `make docs`."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

import openapi

HERE = Path(__file__).parent
PAGE = HERE / "api.md"


def render() -> str:
    """The page, in Markdown."""
    templates = Environment(loader=FileSystemLoader(HERE), keep_trailing_newline=True, autoescape=False)
    return templates.get_template("api.md.jinja").render(api=openapi.document(keyed=True, page=True))


if __name__ == "__main__":
    PAGE.write_text(render())
