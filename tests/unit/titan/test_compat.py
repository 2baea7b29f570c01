"""Each gap closed by compat.py still exists in the pinned torchtitan and this torch.

Only a fresh interpreter shows the state before `install()`.
"""

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torchtitan.trainer
from torchtitan.distributed import utils as dist_utils

from titan_muon.trainer.recipe.degrees import has_torch
from titan_muon.trainer.torchtitan import compat

cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="the gaps of the CPU")

BEFORE_AND_AFTER = """
    import importlib, json, warnings
    import torch, torch.distributed as dist, torch.distributed.fsdp

    def facts():
        utils = importlib.import_module("torchtitan.tools.utils")
        found = {"device": utils.device_type, "set_timeout": hasattr(dist, "set_timeout")}
        found["mesh_dims"] = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")
        try:
            importlib.import_module("torchtitan.models.common.attention")
            found["models"] = True
        except ModuleNotFoundError as error:
            found["models"] = str(error)
        return found

    before = facts()
    for name in [n for n in __import__("sys").modules if n.startswith("torchtitan.") and "tools" not in n]:
        del __import__("sys").modules[name]
    from titan_muon.trainer.torchtitan import compat
    on_cpu, again = compat.install(), compat.install()
    after = facts()
    utils = importlib.import_module("torchtitan.tools.utils")
    attention = importlib.import_module("torchtitan.models.common.attention")
    dims = importlib.import_module("torchtitan.distributed.parallel_dims")
    mask = attention._compiled_create_block_mask
    after |= {
        "on_cpu": on_cpu and again,
        "peak_flops": utils.get_peak_flops("CPU"),
        "mask": getattr(mask, "__wrapped__", mask) is attention.create_block_mask,
        "copied_device": dims.device_type,
    }
    print(json.dumps([before, after]))
"""


def _run(code: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


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
    closed = dict.fromkeys(("set_timeout", "mesh_dims", "models", "on_cpu", "mask"), True)
    assert after == {"device": "cpu", "copied_device": "cpu", "peak_flops": float("inf"), **closed}


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

    calls = attention.create_attention_mask.__code__.co_names
    assert "_compiled_create_block_mask" in calls, "torchtitan makes its masks in another way now"
    calls = context_parallel._create_cp_block_mask.__code__.co_names
    assert "_compiled_create_block_mask" in calls, "torch makes its sharded masks in another way now"
    used = {"get_device_name", "get_device_properties", "memory_stats", "reset_peak_memory_stats", "empty_cache"}
    missing = {name for name in used if not hasattr(torch.cpu, name)}
    assert missing == used, "torch.cpu has some of these now"
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


@pytest.mark.parametrize("family", ["qwen3", "llama3", "deepseek_v3"])
def test_torchtitan_shards_decoders_with_a_single_function(family: str) -> None:
    """The replacement gets the arguments for `shard`, and ends with the context."""
    import models  # noqa: F401 (registers the families)
    from titan_muon.trainer.model.spec import model_spec

    parallelize_fn = model_spec(family, "tiny").parallelize_fn
    module = sys.modules[parallelize_fn.__module__]
    assert compat.shards_decoders(parallelize_fn)
    before, calls = dict(vars(module)), []
    with compat.sharding_decoders_by(parallelize_fn, lambda apply, **options: calls.append((apply, options))):
        (name,) = (name for name, value in vars(module).items() if before.get(name) is not value)
        getattr(module, name)(1, 2, param_dtype=3, reduce_dtype=4, pp_enabled=False)
    ((apply, options),) = calls
    assert apply is before[name]
    assert {"model", "dp_mesh", "cpu_offload", "reshard_after_forward_policy", "dp_mesh_dims"} <= options.keys()
    assert dict(vars(module)) == before


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


def init_with(monkeypatch, **environment: str) -> tuple[dict, str]:
    """Arguments of init_process_group, and TORCH_FR_BUFFER_SIZE during the call."""
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
    return seen, seen.pop("buffer")


def test_the_process_group_uses_the_passed_store_and_keeps_the_users_flight_recorder(monkeypatch) -> None:
    """The default trace_buf_size = 0 must not disable the user's setting."""
    seen, buffer = init_with(monkeypatch)
    assert isinstance(seen["store"], dist.HashStore)
    assert (seen["rank"], seen["world_size"], buffer) == (1, 2, "0")
    assert init_with(monkeypatch, TORCH_FR_BUFFER_SIZE="5000")[1] == "5000"


# The trainer's replacements in TorchTitan's step and loop are still called there, and are undone.


def test_clipping_by_replaces_the_clip_of_the_trainers_step() -> None:
    assert "dist_utils.clip_grad_norm_(" in inspect.getsource(torchtitan.trainer.Trainer.train_step)
    before = dist_utils.clip_grad_norm_
    with compat.clipping_by(lambda: torch.tensor(3.0)):
        assert torchtitan.trainer.dist_utils.clip_grad_norm_([], 1.0, foreach=True).item() == 3.0
    assert dist_utils.clip_grad_norm_ is before


def test_the_training_loop_does_not_sleep_at_the_end() -> None:
    assert "time.sleep(2)" in inspect.getsource(torchtitan.trainer.Trainer.train)
    with compat.ending_at_once():
        torchtitan.trainer.time.sleep(1e9)
    assert torchtitan.trainer.time is time
