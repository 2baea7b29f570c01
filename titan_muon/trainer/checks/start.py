"""Checks before the first step: equal recipe, code, versions and text on all ranks, and the keys on this machine."""

import hashlib
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.tokenizer import BaseTokenizer

import titan_muon
from titan_muon import registry
from titan_muon.engine.tensors.names import listed
from titan_muon.trainer.data.documents import Documents
from titan_muon.trainer.data.loader import PackedDataLoader
from titan_muon.trainer.data.tokenizers import check_tokenizer_folder
from titan_muon.trainer.device import passes_dtype, this_device
from titan_muon.trainer.recipe import Recipe, RecipeError
from titan_muon.trainer.recipe.files import written_values
from titan_muon.trainer.recipe.schema import values
from titan_muon.trainer.recipe.toml import value_text
from titan_muon.trainer.torchtitan import compat

LISTED = 8
PATHS = ("data.files", "data.tokenizer_path", "data.dataset_path", "data.cache", "model.hf_assets_path")
"""Keys that may differ: equal files may be at another path on each node, see `data_facts`."""
ON_GPUS_ALONE = (
    "parallelism.enable_fsdp_symm_mem",
    "compile.enable_async_tensor_parallel",
    "profiler.enable_memory_snapshot",
)


def start_facts(recipe: Recipe) -> dict[str, str]:
    """Recipe keys, versions and digests of source files on this rank, as text by name."""
    keys = {key: value_text(value) for key, value in written_values(recipe).items() if key not in PATHS}
    keys["dtype of parameters in passes"] = passes_dtype(recipe.training.mixed_precision_param, this_device())
    versions = {
        "version of Python": platform.python_version(),
        "version of torch": torch.__version__,
        "version of titan_muon": titan_muon.__version__,
    }
    with suppress(PackageNotFoundError):
        versions["version of torchtitan"] = version("torchtitan")
    sources = {
        f"source file {'/'.join(file.parts[-3:])}": hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in source_files(recipe)
    }
    return {**keys, **versions, **sources}


def data_facts(loader: Any, tokenizer: BaseTokenizer) -> dict[str, str]:
    """Digests of the text and of the tokenizer on this rank. Source `hf` has no digest of its text."""
    facts = {"digest of the tokenizer": getattr(tokenizer, "fingerprint", "unknown")}
    if isinstance(loader, PackedDataLoader):
        facts["digest of the text of data.files"] = loader.fingerprint
    return facts


def source_files(recipe: Recipe) -> list[Path]:
    """Python files of this package, of the model's package, and of imported modules."""
    files = {*Path(titan_muon.__file__).parent.rglob("*.py")}
    files |= {Path(file) for name in recipe.imports if (file := sys.modules[name].__file__) is not None}
    if recipe.model.name in registry.models.names():
        build = registry.models.get(recipe.model.name).build
        module = sys.modules[getattr(build, "func", build).__module__]
        if module.__file__ is not None:
            path = Path(module.__file__)
            files |= {*path.parent.rglob("*.py")} if path.name == "__init__.py" else {path}
    return sorted(files)


def check_start(facts: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Raise RecipeError on every rank, with names and values, if `facts` differ between ranks.

    Collective over `group` (None: a single process).
    """
    if group is None:
        return
    world = dist.get_world_size(group)
    digests: list[bytes] = [b""] * world
    # 1,024 full reports take megabytes on every rank.
    dist.all_gather_object(digests, hashlib.sha256(repr(sorted(facts.items())).encode()).digest(), group=group)
    if len(set(digests)) == 1:
        return
    reports: list[Mapping[str, str]] = [{}] * world
    dist.all_gather_object(reports, facts, group=group)
    lines = differences(reports)
    more = f"; and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
    raise RecipeError(
        f"ranks were started differently: {'; '.join(lines[:LISTED])}{more}. Start all ranks with the same recipe, "
        "installed code, text and tokenizer."
    )


def differences(reports: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each name with unequal values; reports in rank order."""
    lines = []
    for name in dict.fromkeys(name for report in reports for name in report):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, report in enumerate(reports):
            ranks[report.get(name, "absent")].append(rank)
        if len(ranks) > 1:
            at = (f"{value} on rank{'s' * (len(on) > 1)} {listed([*map(str, on)], 4)}" for value, on in ranks.items())
            lines.append(f"{name} is {' and '.join(at)}")
    return lines


def check_machine(recipe: Recipe) -> None:
    """Raise RecipeError for options without support on this machine's device, and as `data_problems`."""
    if compat.install():
        refuse_on_cpu(recipe)
    for problem in data_problems(recipe):
        raise problem


def refuse_on_cpu(recipe: Recipe) -> None:
    """Raise RecipeError for GPU-only options."""
    current = values(recipe)
    for key in ON_GPUS_ALONE:
        if current[key]:
            raise RecipeError("= true is not accepted on the CPU; it needs GPUs. Set it to false.", key=key)
    if recipe.checkpoint.enable and recipe.checkpoint.async_mode == "async_with_pinned_mem":
        raise RecipeError(
            '= "async_with_pinned_mem" is not accepted on the CPU, which pins no memory; use "async".',
            key="checkpoint.async_mode",
        )


def data_problems(recipe: Recipe) -> Iterator[RecipeError]:
    """Errors for text and tokenizer files that this machine lacks."""
    data = recipe.data
    try:
        if data.source != "hf":
            _ = Documents(data).all
    except RecipeError as error:
        yield error
    try:
        if data.tokenizer == "hf":
            check_tokenizer_folder(data.tokenizer_path)
    except RecipeError as error:
        yield error
