"""A file of requests, answered without a server: order, errors by line, going on where it stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import ROOT, RunningServer
from test_service import post

import offline
import wire
from answers import Decision
from batcher import Batcher, BlinkBusy
from blink import TorchEngine
from offline import DeciderDied, OutputMismatch, decide_file

QUESTIONS: dict[str, Any] = {
    "late": {"type": "noul", "instructions": "Is a delivery late?"},
    "team": {"type": "choice", "criteria": {"billing": "Money", "shipping": "Parcels"}},
    "anger": {"type": "score", "criteria": ["calm", "annoyed", "furious"]},
}


class Echo:
    """Says how long the state is; from request number `dies_at` on it is dead."""

    def __init__(self, dies_at: float = float("inf")) -> None:
        self.decided = 0
        self._dies_at = dies_at
        self._lock = threading.Lock()

    def decide(self, request: wire.DecisionRequest, *, client_left: Callable[[], bool]) -> Decision:
        with self._lock:
            self.decided += 1
            if not self.alive():
                raise BlinkBusy("the decision worker died")
        return Decision({"q": wire.NoulAnswer(noul=1 / len(request.state))}, len(request.state))

    def alive(self) -> bool:
        return self.decided < self._dies_at


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def asked(n: int) -> list[Any]:
    """Requests of growing length; every seventh has no question, every eleventh is no JSON."""
    question = {"q": {"type": "noul", "instructions": "Is it late?"}}
    lines: list[Any] = []
    for i in range(1, n + 1):
        questions = {} if i % 7 == 0 else question
        lines.append("{torn" if i % 11 == 0 else {"id": f"r{i}", "state": "x" * (i % 50 + 1), "questions": questions})
    return lines


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_size(path: Path, size: int, process: "subprocess.Popen[Any]") -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.stat().st_size < size:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ten_thousand_lines_in_order(tmp_path: Path) -> None:
    lines = asked(10_000)
    lines[3:3] = ["", "   "]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    told: list[int] = []
    echo = Echo()
    failed = decide_file(echo, "tiny", source, out, told.append)
    found = answers(out)
    assert offline.count_lines(source) == len(found) == sum(told) == 10_000
    assert [one["line"] for one in found] == [i if i <= 3 else i + 2 for i in range(1, 10_001)]
    for i, one in enumerate(found, start=1):
        assert one["model"] == "tiny"
        if i % 11 == 0:
            assert "id" not in one
            assert one["detail"][0]["type"] == "json_invalid"
        elif i % 7 == 0:
            assert one["id"] == f"r{i}"
            assert one["detail"][0]["loc"][:2] == ["body", "questions"]
        else:
            assert one["id"] == f"r{i}"
            assert one["answers"] == {"q": {"type": "noul", "noul": 1 / (i % 50 + 1)}}
            assert one["usage"] == {"input_tokens": i % 50 + 1, "output_tokens": 0}
    assert failed == sum("error" in one for one in found) == 10_000 // 7 + 10_000 // 11 - 10_000 // 77
    assert echo.decided == 10_000 - failed
    assert "torn" not in out.read_text()


@pytest.mark.parametrize("kept", [0, 1, 137, 499, 500])
def test_a_torn_output_is_continued(tmp_path: Path, kept: int) -> None:
    source, whole, out = write(tmp_path / "in.jsonl", asked(500)), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    failed = decide_file(Echo(), "tiny", source, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:kept]) + b"".join(lines[kept : kept + 1])[:20])
    echo = Echo()
    assert decide_file(echo, "tiny", source, out) == failed
    assert out.read_bytes() == whole.read_bytes()
    assert echo.decided == sum("answers" in json.loads(line) for line in lines[kept:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: [{"state": "another", "questions": {}}, *one[1:]], "another line 1"),
        (lambda one: one[:2], "another line 3"),
        (lambda one: ["", *one], "another line 1"),
    ],
)
def test_another_input_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    lines = asked(5)
    out = tmp_path / "out.jsonl"
    decide_file(Echo(), "tiny", write(tmp_path / "in.jsonl", lines), out)
    before = out.read_bytes()
    with pytest.raises(OutputMismatch, match=words):
        decide_file(Echo(), "tiny", write(tmp_path / "in.jsonl", change(lines)), out)
    with pytest.raises(OutputMismatch, match="by tiny, not other"):
        decide_file(Echo(), "other", write(tmp_path / "in.jsonl", lines), out)
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", ["a list\n", "[1]\n", '{"line": 1}\n', "[]\n{}\n"])
def test_what_holds_no_answers_is_left_alone(tmp_path: Path, text: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    with pytest.raises(OutputMismatch, match="something else than answers"):
        decide_file(Echo(), "tiny", write(tmp_path / "in.jsonl", asked(5)), out)
    assert out.read_text() == text


def test_a_dead_worker_ends_the_run(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", asked(1000)), tmp_path / "out.jsonl"
    with pytest.raises(DeciderDied):
        decide_file(Echo(dies_at=300), "tiny", source, out)
    found = answers(out)
    assert 0 < len(found) < 500
    assert not any("worker" in one.get("error", "") for one in found)
    decide_file(Echo(), "tiny", source, out)
    assert len(answers(out)) == 1000


KILLED = """
import sys
from pathlib import Path
from test_offline import Echo
from offline import decide_file
decide_file(Echo(), "tiny", Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_killed_in_the_middle_and_continued_is_the_same_file(tmp_path: Path) -> None:
    source, whole, out = write(tmp_path / "in.jsonl", asked(10_000)), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    failed = decide_file(Echo(), "tiny", source, whole)
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    process = subprocess.Popen([sys.executable, "-c", KILLED, source, out], env=os.environ | {"PYTHONPATH": path})
    wait_for_size(out, 200_000, process)
    process.kill()
    process.wait(60)
    begun = out.read_bytes()
    assert whole.read_bytes().startswith(begun)
    assert 0 < begun.count(b"\n") < 10_000
    assert decide_file(Echo(), "tiny", source, out) == failed
    assert out.read_bytes() == whole.read_bytes()


def test_two_runs_do_not_write_the_same_file(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", asked(5)), tmp_path / "out.jsonl"
    with offline.open_run("tiny", source, out), pytest.raises(OutputMismatch, match="another run writes it"):
        decide_file(Echo(), "tiny", source, out)
    assert decide_file(Echo(), "tiny", source, out) == 0


class Broken(Echo):
    """Fails on one line by a fault of its own."""

    def decide(self, request: wire.DecisionRequest, *, client_left: Callable[[], bool]) -> Decision:
        if request.state == "xxx":
            raise KeyError(request.state)
        return super().decide(request, client_left=client_left)


def test_a_fault_fails_its_line_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, out = write(tmp_path / "in.jsonl", asked(4)), tmp_path / "out.jsonl"
    assert decide_file(Broken(), "tiny", source, out) == 1
    assert ["answers" in one for one in answers(out)] == [True, False, True, True]
    assert answers(out)[1]["detail"]["error_type"] == "api_error"
    assert "line 2 failed: KeyError" in caplog.text
    assert "xxx" not in caplog.text


class Busy(Echo):
    """Refuses every request once."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: set[str] = set()

    def decide(self, request: wire.DecisionRequest, *, client_left: Callable[[], bool]) -> Decision:
        if request.state not in self._refused:
            self._refused.add(request.state)
            raise BlinkBusy("the queue is full")
        return super().decide(request, client_left=client_left)


def test_a_busy_decider_is_asked_again(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", asked(6)), tmp_path / "out.jsonl"
    assert decide_file(Busy(), "tiny", source, out) == 0
    assert len(answers(out)) == 6


def test_a_full_disk_leaves_whole_lines_to_go_on_from(tmp_path: Path) -> None:
    source, whole, out = write(tmp_path / "in.jsonl", asked(500)), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    decide_file(Echo(), "tiny", source, whole)
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n{KILLED}"
    command = [sys.executable, "-c", limited, source, out]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert "File too large" in done.stderr
    assert 0 < out.stat().st_size <= 20_000
    decide_file(Echo(), "tiny", source, out)
    assert out.read_bytes() == whole.read_bytes()


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def requests() -> list[Any]:
    return [{"id": i, "state": "The parcel is late. " * (i % 9 + 1), "questions": QUESTIONS} for i in range(120)]


def command(source: Path, out: Path, model: Path) -> list[str]:
    return [sys.executable, str(ROOT / "offline.py"), "decide", str(source), "--out", str(out), "--model", str(model)]


def numbers(one: dict[str, Any]) -> list[float]:
    given = one["answers"]
    return [given["late"]["noul"], *given["team"]["probabilities"].values(), *given["anger"]["probabilities"].values()]


def test_a_killed_run_goes_on(tmp_path: Path, tiny_qwen35: Path, requests: list[Any]) -> None:
    source, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    engine = TorchEngine(tiny_qwen35, "cpu")
    process = subprocess.Popen(command(source, out, tiny_qwen35), stderr=subprocess.DEVNULL)
    wait_for_size(out, 2000, process)
    process.kill()
    process.wait(60)
    begun = out.read_text().count("\n")
    assert 0 < begun < 120
    again = subprocess.run(command(source, out, tiny_qwen35), capture_output=True, text=True, timeout=240, check=False)
    assert (again.returncode, again.stdout) == (0, "")
    found = answers(out)
    assert [one["id"] for one in found] == list(range(120))
    for one, request in zip(found[::13], requests[::13], strict=True):
        alone = engine.decide(request["state"], QUESTIONS)
        assert numbers(one) == pytest.approx(numbers(alone), abs=1e-4)
        assert one["usage"]["input_tokens"] == alone["meta"]["input_tokens"]
        assert one["model"] == tiny_qwen35.name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, tiny_qwen35: Path, requests: list[Any], number: int) -> None:
    many = [request | {"id": i} for i, request in enumerate(requests * 25)]  # far from done when the signal comes
    source, out = write(tmp_path / "in.jsonl", many), tmp_path / "out.jsonl"
    process = subprocess.Popen(command(source, out, tiny_qwen35), stderr=subprocess.PIPE, text=True)
    wait_for_size(out, 2000, process)
    process.send_signal(number)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130
    assert words.endswith("blink: stopped; run the command again to go on\n")
    assert [one["id"] for one in answers(out)] == list(range(out.read_text().count("\n")))
    assert len(answers(out)) < len(many)


def test_a_batcher_is_a_decider(tmp_path: Path, tiny_qwen35: Path, requests: list[Any]) -> None:
    batcher = Batcher(TorchEngine(tiny_qwen35, "cpu"), max_requests=8, max_queued=offline.WINDOW)
    lines = [*requests[:3], {"state": "x", "questions": {"q": {"type": "noul"}}}]
    out = tmp_path / "out.jsonl"
    assert decide_file(batcher, "tiny", write(tmp_path / "in.jsonl", lines), out) == 1
    assert [("answers" in one, one["line"]) for one in answers(out)] == [(True, 1), (True, 2), (True, 3), (False, 4)]
    assert batcher.close()


def test_a_line_is_what_the_server_says(
    tmp_path: Path, tiny_qwen35: Path, server: RunningServer, requests: list[Any]
) -> None:
    noul = {"type": "noul", "instructions": "Is it late?"}
    bodies: list[Any] = [
        *requests[:5],
        {"questions": {"q": noul}},
        {"state": "x", "questions": {"q": {"type": "box"}, "r": {"type": "noul"}}},
        {"state": "x", "questions": {"q": noul}, "images": []},
        [],
    ]
    batcher = Batcher(TorchEngine(tiny_qwen35, "cpu"), max_requests=8, max_queued=offline.WINDOW)
    out = tmp_path / "out.jsonl"
    assert decide_file(batcher, tiny_qwen35.name, write(tmp_path / "in.jsonl", bodies), out) == 4
    assert batcher.close()
    for one, body in zip(answers(out), bodies, strict=True):
        status, _, said = post(server.url, body)
        own = {key: value for key, value in one.items() if key not in ("line", "input", "id")}
        if status == 200:
            assert numbers(own) == pytest.approx(numbers(said), abs=1e-4)
            assert list(own) == list(said)
            assert own["usage"] == said["usage"]
            assert own["answers"]["anger"]["legend"] == said["answers"]["anger"]["legend"]
        else:
            assert own == {"model": tiny_qwen35.name} | said


def test_a_pipe_in_and_a_pipe_out(tiny_qwen35: Path, requests: list[Any]) -> None:
    lines = "".join(json.dumps(request) + "\n" for request in requests[:3])
    piped = command(Path("-"), Path("-"), tiny_qwen35)
    done = subprocess.run(piped, input=lines, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [0, 1, 2]
    process = subprocess.Popen(piped, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, words = process.communicate(lines, timeout=120)
    assert process.returncode == 1
    assert words.endswith("blink: whoever read the answers has left\n")


def test_what_cannot_be_continued_is_said_before_the_model_loads(tmp_path: Path, tiny_qwen35: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", asked(3)), tmp_path / "out.jsonl"
    decide_file(Echo(), tiny_qwen35.name, source, out)
    other = write(tmp_path / "other.jsonl", asked(3)[1:])
    broken = tmp_path / tiny_qwen35.name  # of the same name, and nothing in it that loads
    broken.mkdir()
    (broken / "config.json").touch()
    for arguments, status, words in (
        ((source, out), 0, ""),  # all is answered
        ((other, out), 1, "--out cannot be continued: it answers another line 1 than the input's: give another --out"),
        ((source, tmp_path / "no" / "out"), 1, "No such file or directory; mend that and run the command again"),
        ((source, tmp_path / "new"), 1, "cannot be loaded"),
    ):
        done = subprocess.run(command(*arguments, broken), capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (status, min(status, 1))
        assert words in done.stderr


def test_bad_settings_are_one_line(tmp_path: Path, tiny_qwen35: Path) -> None:
    source = write(tmp_path / "in.jsonl", asked(2))
    for arguments, words in (
        ([str(tmp_path / "none"), "--out", "x"], "is no file that can be read"),
        ([str(source), "--out", str(source)], "--out should be another file than FILE"),
        ([str(source)], "--out"),
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / "offline.py"), "decide", *arguments, "--model", str(tiny_qwen35)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"BLINK_MODEL": ""},
        )
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert words in done.stderr


def test_failed_lines_give_status_1(tmp_path: Path, tiny_qwen35: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [{"state": "secret", "questions": {}}]), tmp_path / "out.jsonl"
    done = subprocess.run(command(source, out, tiny_qwen35), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "1 of 1 lines could not be answered" in done.stderr
    assert "secret" not in done.stderr + out.read_text()
