"""The page at `/`, in a real browser against a real server."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, expect
from servers import JS, KEY, RunningServer, StartServer
from test_service import get

import page as page_room
from bench.browser import NoBrowserError, chromium

Open = Callable[..., Page]
ODD_NAMES = ["10", "2", "it's", 'a "quoted" one', "back\\slash", "🧭 北", "true", "__proto__"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:  # of the module, since its event loop would be in the way of other modules' own
    try:
        with chromium() as started:
            yield started
    except NoBrowserError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def open_page(browser: Browser, server: RunningServer) -> Iterator[Open]:
    """Opens the page in a fresh profile; fails the test if the page throws, logs an error or asks another host."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def visit(running: RunningServer = server, *, ready: bool = True, quiet: bool = True, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"thrown: {error}"))
        if quiet:
            page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        page.on(
            "request",
            lambda sent: None if sent.url.startswith((running.url, "data:")) else complaints.append(sent.url),
        )
        page.goto(running.url)
        if ready:
            expect(page.locator("#server")).to_contain_text("is ready")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


def decide(page: Page) -> dict[str, Any]:
    """Press the button; returns the server's answer once it is shown."""
    with page.expect_response("**/v1/systemone") as waiting:
        page.get_by_role("button", name="Decide").click()
    answer: dict[str, Any] = waiting.value.json()
    return answer


def questions(page: Page) -> Locator:
    return page.locator(".question")


def clear(page: Page) -> None:
    """Take every question away."""
    while questions(page).count():
        page.get_by_role("button", name=re.compile("^Remove question")).first.click()


def code(page: Page, tab: str) -> str:
    page.get_by_role("tab", name=tab).click()
    return page.locator("#code").inner_text()


def errors(page: Page) -> list[tuple[str, str]]:
    """The marked fields in order: the class or id of each, and the text that describes it."""
    found: list[list[str]] = page.evaluate(
        """() => [...document.querySelectorAll('[aria-invalid=true]')].map((field) => [
            field.className || field.id,
            document.getElementById(field.getAttribute('aria-describedby').split(' ').pop()).textContent,
        ])"""
    )
    return [(where, text) for where, text in found]


# --- as it is sent ---------------------------------------------------------------------------------------------------


def test_the_policy_allows_only_what_the_file_holds(server: RunningServer) -> None:
    status, headers, body = get(server.url + "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>".encode(), body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(rb'(src|href)="(?!data:)|@import|url\(|style="| on[a-z]+="', body)
    assert get(server.url + "/?from=a-link")[0] == 200
    assert len(page_room.load().body) == len(body) < 64_000


def test_no_page(start_server: StartServer) -> None:
    with start_server("--no-page") as running:
        assert get(running.url + "/")[0] == 404
        assert get(running.url + "/healthz")[0] == 200


# --- answers ---------------------------------------------------------------------------------------------------------


def test_an_example_is_answered_with_the_servers_numbers(open_page: Open) -> None:
    page = open_page()
    answer = decide(page)
    team, late, worry = (answer["answers"][name] for name in ("team", "late", "worry"))
    shown = page.get_by_role("region", name="Answer to team")
    expect(shown.locator(".verdict")).to_have_text(team["choice"])
    ranked = sorted(team["probabilities"].items(), key=lambda pair: -pair[1])
    assert [row.inner_text().split("\n")[0] for row in shown.locator(".bars").first.locator("li").all()] == [
        name for name, _ in ranked
    ]
    for row, (_, share) in zip(shown.locator(".bars").first.locator("li").all(), ranked, strict=True):
        expect(row.locator(".share")).to_have_text(f"{share * 100:.1f} %")
        expect(row.locator(".fill")).to_have_css("transition-property", "width")
        page.wait_for_timeout(300)
        track, fill = (row.locator(part).bounding_box() for part in (".track", ".fill"))
        assert track is not None
        assert fill is not None
        assert fill["width"] == pytest.approx(track["width"] * share, abs=1)
    expect(shown.locator(".sure .share")).to_have_text(f"{team['confidence']:.2f}")
    yes = page.get_by_role("region", name="Answer to late")
    expect(yes.locator("li", has_text="yes").locator(".share")).to_have_text(f"{late['noul'] * 100:.1f} %")
    expect(yes.locator(".sure")).to_have_count(0)
    level = page.get_by_role("region", name="Answer to worry")
    expect(level.locator(".verdict")).to_have_text(f"{worry['score']:.2f} of 0 to 2")
    expect(level.locator(".bars").first.locator("li").first).to_contain_text("0 Relaxed")
    expect(page.locator("#summary")).to_contain_text(f"{answer['usage']['input_tokens']} tokens read")
    page.get_by_text("Where the time went").click()
    stages = page.get_by_role("table", name="Milliseconds by stage")
    for stage in ("read", "render", "queue", "forward", "the server, in all", "seen from this page"):
        expect(stages.get_by_role("row", name=stage)).to_contain_text("ms")


def test_every_example_is_answered(open_page: Open) -> None:
    page = open_page()
    buttons = page.get_by_role("group", name="Start from an example").get_by_role("button")
    assert buttons.count() >= 3
    for button in buttons.all():
        button.click()
        answer = decide(page)
        expect(page.locator(".answer")).to_have_count(len(answer["answers"]))
        assert len(answer["answers"]) == questions(page).count()


def test_many_options_are_folded(open_page: Open) -> None:
    page = open_page()
    clear(page)
    page.get_by_role("button", name="+ Choice").click()
    for _ in range(18):
        page.get_by_role("button", name="+ Option").click()
    for i, field in enumerate(page.locator(".row .name").all()):
        field.fill(f"option {i}")
    decide(page)
    expect(page.locator(".answer .bars li:visible")).to_have_count(9)  # with the confidence
    page.get_by_text("12 more").click()
    expect(page.locator(".answer .bars li:visible")).to_have_count(21)


def test_names_and_states_arrive_as_typed(open_page: Open) -> None:
    page = open_page()
    clear(page)
    page.get_by_role("button", name="+ Choice").click()
    for _ in ODD_NAMES[2:]:
        page.get_by_role("button", name="+ Option").click()
    for field, name in zip(page.locator(".row .name").all(), ODD_NAMES, strict=True):
        field.fill(name)
    page.get_by_label("Id", exact=True).fill('it\'s "odd" 배')
    page.get_by_label("State", exact=True).fill(
        '{"b": 12345678901234567890, "2": null, "1": [true, "\\ud83e\\udded it\'s"]}'
    )
    page.get_by_role("radio", name="JSON").check()
    with page.expect_request("**/v1/systemone") as waiting:
        answer = decide(page)
    sent = json.loads(waiting.value.post_data or "", object_pairs_hook=list)
    fields = dict(sent)
    assert fields["state"] == [("b", 12345678901234567890), ("2", None), ("1", [True, "🧭 it's"])]
    ((name, question),) = fields["questions"]
    assert name == 'it\'s "odd" 배'
    assert [option for option, _ in dict(question)["criteria"]] == ODD_NAMES
    assert list(answer["answers"][name]["probabilities"]) == ODD_NAMES
    expect(page.locator(".answer .bars").first.locator("li")).to_have_count(len(ODD_NAMES))


# --- code ------------------------------------------------------------------------------------------------------------


def test_the_code_runs_and_gives_the_same_answer(open_page: Open, node: str) -> None:
    page = open_page()
    page.get_by_role("button", name="A message to sort").click()
    page.get_by_label("State", exact=True).fill('It\'s the "third" parcel,\nC:\\boots 🥾\ttoday')
    answer = decide(page)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TYPESAFE_")}

    def output(command: list[str], text: str) -> str:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=env, cwd=JS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(output(["bash"], code(page, "curl"))) == answer
    python = code(page, "Python").replace("print(name, answer)", "print(answer.model_dump_json())")
    late = json.loads(output([sys.executable, "-"], python).splitlines()[1])
    assert late["noul"] == pytest.approx(answer["answers"]["late"]["noul"])
    javascript = code(page, "JavaScript").replace("console.log(answers)", "console.log(JSON.stringify(answers))")
    assert json.loads(output([node, "--input-type=module"], javascript)) == answer["answers"]
    assert json.loads(code(page, "Answer")) == answer


def test_json_states_run_as_python(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("button", name="An alert to rank").click()
    page.get_by_label("State", exact=True).fill(
        '{"on": true, "note": "null and \\u00e9\\/", "off": [false, null, -1.5e3]}'
    )
    names: dict[str, Any] = {}
    exec(re.sub(r"(?s).*\bstate=(.*),\n    questions=.*", r"state = \1", code(page, "Python")), names)
    assert names["state"] == {"on": True, "note": "null and é/", "off": [False, None, -1500.0]}
    page.get_by_label("State", exact=True).fill("{")
    assert "not valid JSON yet" in page.locator("#code").inner_text()


def test_code_is_copied(open_page: Open) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").click()
    expect(page.locator("#copied")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#code").inner_text()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_the_servers_errors_stand_at_their_fields(open_page: Open) -> None:
    page = open_page(quiet=False)
    clear(page)
    for kind in ("+ Yes or no", "+ Choice", "+ Score", "+ Score"):
        page.get_by_role("button", name=kind).click()
    judged, picked, graded, unnamed = questions(page).all()
    for row in picked.get_by_role("button", name=re.compile("Remove option")).all()[::-1]:
        row.click()
    for _ in range(8):
        graded.get_by_role("button", name="+ Level").click()
    unnamed.get_by_label("Id", exact=True).fill("")
    page.get_by_label("State", exact=True).fill("data:image/png;base64,AAAA")
    decide(page)
    expect(page.locator("#problem")).to_have_text("5 fields need a change.")
    assert errors(page) == [
        ("state", "this model reads text only"),
        ("instructions", "A noul should have instructions or criteria"),
        ("criteria", "At least 1 and at most 255 options per choice"),
        ("criteria", "a score takes 2 to 10 levels"),
        ("id", "A question id should not be empty"),
    ]
    expect(page.get_by_label("State", exact=True)).to_be_focused()
    expect(judged.locator(".error")).to_be_visible()
    page.get_by_role("button", name="A message to sort").click()
    decide(page)
    expect(page.locator("#summary")).to_contain_text("3 answers")
    assert errors(page) == []
    expect(page.locator("#problem")).to_be_empty()


def test_no_questions_at_all(open_page: Open) -> None:
    page = open_page(quiet=False)
    clear(page)
    decide(page)
    expect(page.locator("#questions")).to_be_focused()
    assert errors(page) == [("questions", "A request should have at least 1 question")]


def test_what_json_cannot_carry_is_not_sent(open_page: Open) -> None:
    page = open_page()
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.get_by_label("Id", exact=True).nth(1).fill("team")
    page.get_by_label("Name of option 2").fill("Billing")
    page.get_by_role("radio", name="JSON").check()
    page.get_by_role("button", name="Decide").click()
    expect(page.locator("#problem")).to_have_text("Nothing was sent yet.")
    assert errors(page) == [
        ("state", "This is not valid JSON."),
        ("name", "Another option has this name."),
        ("id", "Another question has this id."),
    ]
    assert sent == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "cannot be reached"),
        ((503, {"error": "the queue is full", "detail": {}}), "busy: the queue is full"),
        ((500, {"error": "the server failed on request req_1", "detail": {}}), "answered 500"),
        ((422, {"error": "x", "detail": [{"type": "t", "loc": ["body", "other"], "msg": "Some place"}]}), "Some place"),
    ],
)
def test_other_failures_are_told(open_page: Open, answer: tuple[int, Any] | None, words: str) -> None:
    page = open_page(quiet=False)

    def handle(route: Route) -> None:
        if answer is None:
            route.abort()
        else:
            route.fulfill(status=answer[0], json=answer[1])

    page.route("**/v1/systemone", handle)
    page.get_by_role("button", name="Decide").click()
    expect(page.get_by_role("alert")).to_contain_text(words)
    page.unroute("**/v1/systemone")
    decide(page)
    expect(page.locator("#problem")).to_be_empty()


def test_a_loading_server_is_followed(open_page: Open, server: RunningServer) -> None:
    health = json.loads(get(server.url + "/healthz")[2])
    loading = health | {"ok": False, "status": "loading", "progress": 0.42}
    page = open_page(quiet=False)
    page.route("**/healthz", lambda route: route.fulfill(status=503, json=loading))
    page.locator("#facts summary").click()
    expect(page.locator("#server")).to_contain_text("is loading 42 %")
    page.unroute("**/healthz")
    page.reload()
    expect(page.locator("#server")).to_contain_text("is ready")
    page.locator("#facts summary").click()
    facts = page.get_by_role("table", name="Facts about this server")
    expect(facts.get_by_role("row", name="device cpu, float32")).to_be_visible()
    expect(facts.get_by_role("row", name="models")).to_contain_text(health["model"])


def test_a_key_is_asked_for_and_kept_in_memory_only(open_page: Open, keyed_server: RunningServer) -> None:
    page = open_page(keyed_server, quiet=False)
    decide(page)
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    assert errors(page) == [("key", "The server asks for its key.")]
    key.fill("another")
    decide(page)
    assert errors(page) == [("key", "The server does not know this key.")]
    key.fill(KEY)
    decide(page)
    expect(page.locator("#summary")).to_contain_text("3 answers")
    assert errors(page) == []
    for tab in ("curl", "Python", "JavaScript"):
        text = code(page, tab)
        assert KEY not in text
        assert "TYPESAFE_API_KEY" in text
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert KEY not in kept
    page.reload()
    expect(page.get_by_label("API key")).to_have_value("")


# --- for everyone ----------------------------------------------------------------------------------------------------


def tab_to(page: Page, target: Locator) -> None:
    """Press Tab until `target` has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        with suppress(AssertionError):
            expect(target).to_be_focused(timeout=20)
            return
    pytest.fail("Tab does not get there")


def test_keyboard_alone_is_enough(open_page: Open) -> None:
    page = open_page()
    press, write = page.keyboard.press, page.keyboard.type
    for name in ("team", "late", "worry"):
        tab_to(page, page.get_by_role("button", name=f"Remove question {name}"))
        press("Enter")
    expect(questions(page)).to_have_count(0)
    press("Enter")  # the focus waits at the first button that adds a question
    write("Which animal?")
    tab_to(page, page.get_by_label("Name of option 1"))
    write("cat")
    tab_to(page, page.get_by_label("Name of option 2"))
    write("dog")
    press("Tab")
    press("Tab")
    press("Space")  # removes the second
    expect(page.get_by_label("Name of option 1")).to_be_focused()
    tab_to(page, page.get_by_role("button", name="+ Option"))
    press("Enter")
    write("owl")
    tab_to(page, page.get_by_role("button", name="+ Score"))
    press("Enter")
    expect(page.get_by_label("Question", exact=True).nth(1)).to_be_focused()
    write("How large?")
    for i, text in enumerate(("small", "middling", "large")):
        tab_to(page, questions(page).nth(1).get_by_label(f"Meaning of level {i}"))
        write(text)
    with page.expect_request("**/v1/systemone") as waiting:
        press("Control+Enter")
    expect(page.locator("#summary")).to_contain_text("2 answers")
    asked = json.loads(waiting.value.post_data or "")["questions"]
    assert asked["choice_1"] == {
        "type": "choice",
        "instructions": "Which animal?",
        "criteria": {"cat": None, "owl": None},
    }
    assert asked["score_1"]["criteria"] == ["small", "middling", "large"]
    tab_to(page, page.get_by_role("tab", name="curl"))
    press("ArrowRight")
    expect(page.get_by_role("tab", name="Python")).to_be_focused()
    assert "TypeSafeClient" in page.locator("#code").inner_text()
    press("End")
    expect(page.get_by_role("tab", name="Answer")).to_be_focused()


def test_a_phone_needs_no_sideways_scrolling(open_page: Open) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.get_by_label("Name of option 1").fill("Donaudampfschifffahrtselektrizitätenhauptbetriebswerk" * 2)
    decide(page)
    expect(page.locator(".answer")).to_have_count(3)
    page.locator("#facts summary").click()
    expect(page.get_by_role("row", name="versions")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for button in page.get_by_role("button").all():
        box = button.bounding_box()
        assert box is None or (box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["height"] >= 24)


def brightness(page: Page, selector: str, style: str) -> float:
    red, green, blue = re.findall(
        r"\d+", page.locator(selector).first.evaluate(f"one => getComputedStyle(one).{style}")
    )[:3]
    return (int(red) + int(green) + int(blue)) / 3


def test_dark_where_the_system_is_dark(open_page: Open) -> None:
    light, dark = open_page(), open_page(color_scheme="dark")
    assert brightness(light, "body", "backgroundColor") > 200 > 60 > brightness(light, "body", "color")
    assert brightness(dark, "body", "backgroundColor") < 60 < 200 < brightness(dark, "body", "color")
    assert brightness(dark, "#state", "backgroundColor") < 60


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_barrier_that_a_checker_finds(open_page: Open, scheme: str) -> None:
    page = open_page(color_scheme=scheme, quiet=False, bypass_csp=True)  # the checker runs inside the page
    decide(page)
    page.get_by_text("Where the time went").click()
    page.locator("#facts summary").click()
    expect(page.get_by_role("row", name="versions")).to_be_visible()
    for faulty in (False, True):
        if faulty:
            page.get_by_label("Id", exact=True).first.fill("")
            decide(page)
            expect(page.locator(".error")).to_have_count(1)
        found = Axe().run(page).response["violations"]
        assert [(rule["id"], [node["html"][:120] for node in rule["nodes"]]) for rule in found] == []
