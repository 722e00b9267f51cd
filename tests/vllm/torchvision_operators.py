"""Lets torchvision import beside a CPU torch, for `.venv-vllm` only: a `.pth` file there imports this module.

PyPI's torchvision is compiled for a CUDA torch, its operators do not load beside another, and its import then trips
over two that it expects. vLLM imports it for models that see; the tests run none, so declarations are enough.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_declared: list[Any] = []  # operators live as long as their library object


class _BeforeTorchvision(MetaPathFinder):
    """Declares the operators when torchvision is about to be imported: most processes never do, and torch is slow."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "torchvision" and not _declared:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            _declared.append(library)
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
