"""Each gap closed by compat.py still exists in the pinned torchtitan and this torch; choices by the device.

Only a fresh interpreter shows the state before `install()`.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torchtitan.trainer
from torchtitan.distributed import utils as dist_utils

from titan_muon.trainer import device
from titan_muon.trainer.recipe.degrees import has_torch
from titan_muon.trainer.torchtitan import compat

cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="the gaps of the CPU")

BEFORE_AND_AFTER = """
import importlib, json, sys
import torch, torch.distributed as dist, torch.distributed.fsdp

def facts():
    utils = importlib.import_module("torchtitan.tools.utils")
    found = {"device": utils.device_type, "set_timeout": hasattr(dist, "set_timeout")}
    found["mesh_dims"] = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")
    try:
        importlib.import_module("torchtitan.models.common.attention")
        return {**found, "models": True}
    except ModuleNotFoundError as error:
        return {**found, "models": str(error)}

before = facts()
for name in [n for n in sys.modules if n.startswith("torchtitan.") and "tools" not in n]:
    del sys.modules[name]
from titan_muon.trainer.torchtitan import compat
on_cpu = compat.install() and compat.install()
dims = importlib.import_module("torchtitan.distributed.parallel_dims")
print(json.dumps([before, {**facts(), "on_cpu": on_cpu, "copied_device": dims.device_type}]))
"""


def _run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)


def test_torchtitan_is_the_version_of_the_workarounds() -> None:
    assert metadata.version("torchtitan") == compat.TORCHTITAN_VERSION


@cpu_only
def test_every_gap_exists_and_is_closed() -> None:
    result = _run(BEFORE_AND_AFTER)
    assert result.returncode == 0, result.stderr
    before, after = json.loads(result.stdout.splitlines()[-1])
    # CUDA builds of torch have triton.
    models_import = True if importlib.util.find_spec("triton") else "No module named 'triton'"
    gaps = {"set_timeout": has_torch(2, 14), "mesh_dims": has_torch(2, 12)}
    assert before == {"device": "cuda", "models": models_import, **gaps}
    closed = dict.fromkeys(("set_timeout", "mesh_dims", "models", "on_cpu"), True)
    assert after == {"device": "cpu", "copied_device": "cpu", **closed}


@cpu_only
def test_installing_after_the_import_of_torchtitan_is_an_error() -> None:
    result = _run("import torchtitan.distributed; from titan_muon.trainer.torchtitan import compat; compat.install()")
    assert result.returncode == 1
    assert "RuntimeError: compat.install() must run before torchtitan.distributed is imported" in result.stderr


@cpu_only
def test_the_replaced_functions_are_the_used_functions() -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
    from torchtitan.models.common import attention
    from torchtitan.tools import utils

    assert utils.get_peak_flops("CPU") == float("inf")
    made = attention._compiled_create_block_mask
    assert getattr(made, "__wrapped__", made) is attention.create_block_mask
    for makes in (attention.create_attention_mask, context_parallel._create_cp_block_mask):
        assert "_compiled_create_block_mask" in makes.__code__.co_names, "masks are made in another way now"
    used = ("get_device_name", "get_device_properties", "memory_stats", "reset_peak_memory_stats", "empty_cache")
    assert not [name for name in used if hasattr(torch.cpu, name)], "torch.cpu has some of these now"
    assert utils.device_module.device_count() == torch.cpu.device_count()
    with pytest.raises(AttributeError):
        _ = utils.device_module.no_such_function


def test_masks_are_created_without_options_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common import attention

    options = []
    monkeypatch.setattr(attention, "_compiled_create_block_mask", lambda *_, **named: options.append(sorted(named)))
    compat.drop_unknown_mask_options()
    attention._compiled_create_block_mask(None, B=1, separate_full_blocks=True)
    assert options == [["B", "separate_full_blocks"] if has_torch(2, 13) else ["B"]]


def test_spmd_backend_follows_the_torch_version(monkeypatch) -> None:
    for version, backend in (("2.13.1", "partial_dtensor"), ("2.14.0a0+git123", "spmd_types")):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        assert compat.spmd_backend("auto") == backend
        assert compat.spmd_backend("spmd_types") == "spmd_types"
        assert compat.spmd_backend("auto", owned=True) == "partial_dtensor"
        assert compat.spmd_backend("auto", uneven_vocabulary=True) == "partial_dtensor"
        with pytest.raises(ValueError, match="a vocabulary that tensor_parallel_degree divides"):
            compat.spmd_backend("spmd_types", uneven_vocabulary=True)


def test_timeouts_reach_every_group_except_the_checkpoint_group(monkeypatch) -> None:
    """Groups outside the mesh, such as the group of the stop signal, must not keep PyTorch's 30 minutes."""
    utils = importlib.import_module("torchtitan.distributed.utils")
    groups = [SimpleNamespace(group_desc=name) for name in ("default_pg", "undefined", compat.ASYNC_CHECKPOINT)]
    monkeypatch.setattr(dist, "barrier", lambda **_: None)
    groups_set = []
    monkeypatch.setattr(dist, "set_timeout", lambda seconds, group: groups_set.append(group))
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
    dims = SimpleNamespace(get_all_one_dimensional_meshes=dict)
    utils.set_pg_timeouts(timedelta(seconds=5), dims)
    assert groups_set == [None, *groups[:2]]


@pytest.mark.parametrize(("environment", "buffer"), [({}, "0"), ({"TORCH_FR_BUFFER_SIZE": "5000"}, "5000")])
def test_the_process_group_uses_the_passed_store_and_keeps_the_users_flight_recorder(
    monkeypatch, environment: dict[str, str], buffer: str
) -> None:
    """The default trace_buf_size = 0 must not disable the user's setting."""
    seen = {}

    def init_process_group(**arguments) -> None:
        seen.update(arguments, buffer=os.environ["TORCH_FR_BUFFER_SIZE"])

    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "2"} | environment)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    config = importlib.import_module("torchtitan.config.configs").CommConfig(trace_buf_size=0)
    compat.init_distributed(config, store=dist.HashStore())
    assert dist.init_process_group is init_process_group
    assert isinstance(seen["store"], dist.HashStore)
    assert (seen["rank"], seen["world_size"], seen["buffer"]) == (1, 2, buffer)


def test_the_replacements_in_torchtitans_step_and_loop_are_called_there_and_undone() -> None:
    assert "dist_utils.clip_grad_norm_(" in inspect.getsource(torchtitan.trainer.Trainer.train_step)
    assert "time.sleep(2)" in inspect.getsource(torchtitan.trainer.Trainer.train)
    before = dist_utils.clip_grad_norm_
    with compat.clipping_by(lambda: torch.tensor(3.0)), compat.ending_at_once():
        assert torchtitan.trainer.dist_utils.clip_grad_norm_([], 1.0, foreach=True).item() == 3.0
        torchtitan.trainer.time.sleep(1e9)
    assert (dist_utils.clip_grad_norm_, torchtitan.trainer.time) == (before, time)


# Choices by the device are in one file, and a recipe can override each choice on any device.

TITAN = Path(device.__file__).parent
# Gaps of the CPU and gloo until a later TorchTitan; and a CPU-only kernel.
ALLOWED = {TITAN / "device.py", TITAN / "torchtitan" / "compat.py", TITAN / "model" / "logits.py"}


def branches(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "is_available":
            yield f"{path.name}:{node.lineno}"
        if isinstance(node, ast.Compare):
            compared = [item.value for item in (node.left, *node.comparators) if isinstance(item, ast.Constant)]
            if {"cpu", "cuda"} & {value for value in compared if isinstance(value, str)}:
                yield f"{path.name}:{node.lineno}"


def test_only_device_py_branches_on_the_device() -> None:
    assert list(branches(TITAN / "device.py")), "the search finds what it looks for"
    assert [place for path in TITAN.rglob("*.py") if path not in ALLOWED for place in branches(path)] == []


@pytest.mark.parametrize("gpu", [False, True])
def test_auto_follows_the_device_and_explicit_values_follow_the_recipe(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(device, "on_accelerator", lambda: gpu)
    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: gpu)
    monkeypatch.setattr(device, "has_torch_for", lambda key: True)
    assert [device.loss_chunks(*of) for of in (("auto", 2048), ("auto", 2050), (4, 2048))] == [8 if gpu else 1, 1, 4]
    assert device.adamw_implementation("auto") == ("fused" if gpu else "foreach")
    assert device.adamw_implementation("for-loop") == "for-loop"
    # On a CPU without instructions for bfloat16, passes are in float32.
    asked = (("auto", "cpu"), ("auto", "cuda"), ("bfloat16", "cpu"))
    assert [device.passes_dtype(*of) for of in asked] == ["bfloat16" if gpu else "float32", "bfloat16", "bfloat16"]
    monkeypatch.setattr(device, "has_torch_for", lambda key: key != "loss.chunks")
    assert device.loss_chunks("auto", 2048) == 1, "torch is too old"
