"""The image, compose and Kubernetes files: valid by their schemas, true to the server, and an image that is complete.

No container is built here. What the Dockerfile copies is run as it says, in a sandbox that allows what a container
would: no network, nothing to write to but /cache and /tmp, no privileges.
"""

import glob
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from servers import ROOT

import serve

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
USER = 10001


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def instructions() -> list[tuple[str, str]]:
    """Word and rest of each instruction of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def the(word: str) -> str:
    (rest,) = [rest for found, rest in instructions() if found == word]
    return rest


def manifests() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def pod() -> dict[str, Any]:
    found: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    return found


def nginx(name: str) -> list[str]:
    """Values of a directive of nginx.conf."""
    return re.findall(rf"^\s*{name} ([^;{{]+);", (DEPLOY / "nginx.conf").read_text(), flags=re.MULTILINE)


def settings(args: Sequence[str], model: Path) -> Any:
    """The flags of a container as the server reads them, over a model that is there."""
    assert args[:2] == ["--model", "/model"]
    return serve.parse_args(["--model", str(model), *args[2:]])


# --- schemas ---------------------------------------------------------------------------------------------------------


def test_the_dockerfile_follows_the_rules() -> None:
    done = run(BIN / "hadolint", DEPLOY / "Dockerfile")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", ["compose.yml", "compose.cuda.yml"])
def test_compose_files_follow_the_specification(file: str, tmp_path: Path) -> None:
    check = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = run(*check, DEPLOY / file)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / file
    wrong.write_text((DEPLOY / file).read_text().replace("services:", "services:\n  x: {imag: y}"))
    assert run(*check, wrong).returncode == 1


def test_manifests_follow_the_schemas() -> None:
    found = manifests()
    assert found.keys() == {"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"}
    for version in ("1.30", "1.37"):
        for document in found.values():
            kubernetes_validate.validate(document, version, strict=True)
    found["Deployment"]["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found["Deployment"], "1.37", strict=True)


# --- what must agree -------------------------------------------------------------------------------------------------


def test_nginx_knows_the_replicas_of_compose() -> None:
    services = compose()["services"]
    replicas = [service for name, service in services.items() if name.startswith("blink-")]
    addresses = [f"{one['networks']['inside']['ipv4_address']}:8000 max_fails=0" for one in replicas]
    assert nginx("server") == addresses
    assert nginx("proxy_next_upstream_tries") == [str(len(replicas))]
    assert nginx("listen") == [services["nginx"]["ports"][0].rsplit(":", 1)[1]]
    cuda = yaml.safe_load((DEPLOY / "compose.cuda.yml").read_text())["services"]
    assert cuda.keys() == services.keys() - {"nginx"}


def test_limits_and_times_agree(tiny_qwen35: Path) -> None:
    replica, args = compose()["services"]["blink-1"], container()["args"]
    for flags in (json.loads(the("CMD")), replica["command"], args):
        if "--api-key-file" in flags:
            flags = [flag for flag in flags if flag not in ("--api-key-file", "/keys/keys")]
        made = settings(flags, tiny_qwen35)
        assert (made.host, made.port) == ("0.0.0.0", 8000)
        assert nginx("client_max_body_size") == [f"{made.max_body_bytes >> 20}m"]
        assert int(nginx("proxy_read_timeout")[0].removesuffix("s")) > made.request_timeout_s
    assert int(replica["stop_grace_period"].removesuffix("s")) > serve.DRAIN_S
    before_the_signal = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod()["terminationGracePeriodSeconds"] > before_the_signal + serve.DRAIN_S
    assert container()["ports"][0]["containerPort"] == int(the("EXPOSE")) == made.port


def test_everything_runs_confined() -> None:
    assert the("USER") == f"{USER}:{USER}"
    for service in compose()["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(volume.endswith((":ro", ":/cache")) for volume in service["volumes"])
        assert service["tmpfs"] == ["/tmp"]
    assert compose()["networks"]["inside"]["internal"] is True
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["runAsUser"] == USER
    rights = container()["securityContext"]
    assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
    assert rights["capabilities"] == {"drop": ["ALL"]}
    writable = {mount["mountPath"] for mount in container()["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/cache", "/tmp"}
    assert manifests()["NetworkPolicy"]["spec"]["egress"] == []


def test_manifests_agree_with_each_other() -> None:
    found = manifests()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == container()["ports"][0]["name"]
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    assert "replicas" not in found["Deployment"]["spec"]  # a later `kubectl apply` would undo the scaler's number
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == "blink_queued_requests"
    assert float(scaler["metrics"][0]["pods"]["target"]["averageValue"]) < 64
    mounted, volumes = container()["volumeMounts"], pod()["volumes"]
    assert {mount["name"] for mount in mounted} == {volume["name"] for volume in volumes}


# --- the image, without a container ----------------------------------------------------------------------------------

# Runs inside: the command of the image, its health check until it passes, a request, what may be written, the end.
PROBE = """
import json, os, signal, socket, subprocess, sys, time, urllib.request
command, check = json.loads(sys.argv[1]), json.loads(sys.argv[2])
server = subprocess.Popen(command)
deadline = time.monotonic() + 180
while subprocess.run(check, stderr=subprocess.DEVNULL).returncode:
    assert server.poll() is None and time.monotonic() < deadline
    time.sleep(0.2)
asked = {"state": "fog", "questions": {"late": {"type": "noul", "instructions": "Is it late?"}}}
request = urllib.request.Request("http://127.0.0.1:8000/v1/systemone", json.dumps(asked).encode())
answer = json.load(urllib.request.urlopen(request, timeout=60))
def writable(folder):
    try:
        open(f"{folder}/probe", "w").close()
    except OSError:
        return False
    return True
places = {folder: writable(folder) for folder in ("/", "/opt/blink", "/model", "/usr", "/cache", "/tmp")}
status = open(f"/proc/{server.pid}/status").read()
told = dict(line.split(":", 1) for line in status.splitlines())
server.send_signal(signal.SIGTERM)
print(json.dumps({
    "answer": answer["answers"], "places": places, "user": told["Uid"].split(), "rights": told["CapEff"].strip(),
    "interfaces": [name for _, name in socket.if_nameindex()], "status": server.wait(60),
}))
"""


def copied(to: Path) -> None:
    """Lay out what the Dockerfile copies."""
    for word, rest in instructions():
        if word != "COPY":
            continue
        *sources, target = rest.split()
        for source in sources:
            for name in glob.glob(source, root_dir=ROOT):
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, to / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, to / target)


def test_what_the_image_holds_serves_without_network_root_or_places_to_write(tiny_qwen35: Path, tmp_path: Path) -> None:
    sandbox = shutil.which("bwrap")
    if sandbox is None:
        if os.environ.get("CI") == "true":
            pytest.fail("bubblewrap is missing")
        pytest.skip("needs bubblewrap")
    image = tmp_path / "image"
    image.mkdir()
    copied(image)
    packages = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    libraries = {Path(sys.prefix), Path(sys.base_prefix), *packages, *map(Path, site.getsitepackages())}
    shown = [
        *libraries,
        *(Path("/", name) for name in ("usr", "lib", "lib64", "bin", "etc") if Path("/", name).exists()),
    ]
    workdir, python = the("WORKDIR"), sys.executable
    command = [python if word == "python" else word for word in json.loads(the("ENTRYPOINT")) + json.loads(the("CMD"))]
    check = [python if word == "python" else word for word in json.loads(the("HEALTHCHECK").split("CMD", 1)[1])]
    environment = [pair.split("=", 1) for pair in shlex.split(the("ENV"))]
    done = run(
        *(sandbox, "--unshare-all", "--die-with-parent", "--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL"),
        *("--tmpfs", "/cache", "--tmpfs", "/tmp"),
        *(word for path in shown for word in ("--ro-bind", str(path), str(path))),
        *("--ro-bind", image, workdir, "--ro-bind", tiny_qwen35, "/model", "--proc", "/proc", "--dev", "/dev"),
        *("--remount-ro", "/", "--chdir", workdir, "--clearenv"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "OMP_NUM_THREADS", "2"),
        *(word for name, value in environment for word in ("--setenv", name, value)),
        *(python, "-c", PROBE, json.dumps(command), json.dumps(check)),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["answer"]["late"]["type"] == "noul"
    places = {folder for folder, writable in told["places"].items() if writable}
    assert places == {"/cache", "/tmp"}
    assert told["user"] == [str(USER)] * 4
    assert int(told["rights"], 16) == 0
    assert told["interfaces"] == ["lo"]
    assert told["status"] == 0
    assert "Traceback" not in done.stderr
