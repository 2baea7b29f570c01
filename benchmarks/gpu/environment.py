"""Environment of a result: GPUs, driver, PyTorch, other packages, and state of the source.

`python -m benchmarks.gpu.environment` prints the environment as JSON. The runner asks a separate process, because a
process that has asked CUDA for a name holds some hundred MB of the GPU until its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torchtitan", "tyro", "pytest", "pytest_timeout", "tokenizers", "triton", "einops")
CANDIDATES = ("python3", "python", *(str(ROOT / name / "bin/python") for name in (".venv-newest", ".venv")))
"""Interpreters to try without PYTHON_GPU, in order."""
LEAST_TORCH = (2, 11)
SHARING_RANKS = 4
"""Ranks that share a single GPU over gloo: the fewest with every layout."""


@dataclass(frozen=True)
class Environment:
    """Environment of the parts.

    Attributes:
        gpus: names of the CUDA devices; empty for a rehearsal.
        torch: version of PyTorch.
        cuda: CUDA version of PyTorch, or empty.
        driver: version of the GPUs' driver, or empty.
        commit: of the source, with a digest of later changes; empty without git.
        packages: installed packages of PACKAGES.
        unused: reason why PyTorch uses none of the machine's GPUs, or empty.
        executable: the interpreter.
    """

    gpus: tuple[str, ...]
    torch: str
    cuda: str
    driver: str
    python: str
    commit: str
    packages: tuple[str, ...]
    unused: str = ""
    executable: str = sys.executable

    @property
    def ranks(self) -> int:
        """Ranks to start: the number of GPUs, rounded down to a power of two for meshes and batches."""
        return 1 << (len(self.gpus).bit_length() - 1) if self.gpus else 2

    @property
    def exchanging_ranks(self) -> int:
        """Ranks to start for parts without figures: several on a single GPU, over gloo."""
        return self.ranks if len(self.gpus) > 1 else SHARING_RANKS

    def same(self, other: Environment) -> bool:
        """Whether results of `other` hold here; unknown without git."""
        mine, theirs = ((environment.gpus, environment.torch, environment.commit) for environment in (self, other))
        return mine == theirs and self.commit != ""


def of(document: dict) -> Environment:
    """An environment from its JSON."""
    lists = {key: tuple(document[key]) for key in ("gpus", "packages")}
    return Environment(**{**document, **lists})


def ask(python: str, paths: Iterable[Path] = ()) -> Environment:
    """Environment of an interpreter with further import paths. Raises ValueError if PyTorch fails or is too old."""
    command = [python, "-m", "benchmarks.gpu.environment"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120, env=variables(paths)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{python} does not run: {error}") from error
    if done.returncode != 0:
        raise ValueError(f"{python} cannot run PyTorch: {done.stderr.strip()[-300:]}")
    environment = of(json.loads(done.stdout.splitlines()[-1]))
    if tuple(int(number) for number in environment.torch.split(".")[:2]) < LEAST_TORCH:
        raise ValueError(f"{python} has torch {environment.torch}, and {'.'.join(map(str, LEAST_TORCH))} is the oldest")
    return environment


def variables(paths: Iterable[Path] = ()) -> dict[str, str]:
    """Environment variables of a process with this project and further folders to import from."""
    imported = [str(ROOT), *map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A step that frees its buffers fragments the memory without expandable segments.
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(imported)}


def choose(named: str) -> Environment:
    """The named interpreter, or the first with a GPU, or the first that can rehearse. Raises ValueError without any."""
    environments, problems = [], []
    candidates = [named] if named else [python for name in CANDIDATES if (python := shutil.which(name))]
    for python in candidates:
        try:
            environments.append(ask(python))
        except ValueError as error:
            problems.append(str(error))
    usable = [environment for environment in environments if environment.gpus]
    unused = [environment for environment in environments if environment.unused]
    if usable or (environments and not unused):
        return (usable or environments)[0]
    remedy = "install PyTorch 2.11 or newer that fits the GPU's driver, and name its interpreter: make gpu PYTHON_GPU="
    raise ValueError("; ".join([*(environment.unused for environment in unused), *problems, remedy]))


def current_environment() -> Environment:
    """Environment of this process."""
    import torch

    has_gpu = torch.cuda.is_available()
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if has_gpu else ()
    unused = "" if has_gpu else unused_gpus(Path("/dev"), torch.__version__, torch.version.cuda)
    packages = tuple(name for name in PACKAGES if find_spec(name) is not None)
    return Environment(
        gpus,
        torch.__version__,
        torch.version.cuda or "",
        _driver(),
        platform.python_version(),
        commit(),
        packages,
        unused,
    )


def unused_gpus(devices: Path, version: str, cuda: str | None) -> str:
    """Reason why PyTorch finds none of the GPUs with a file in `devices`; empty without GPUs, or if they are hidden."""
    # A rehearsal instead of the run would hide a mismatch of PyTorch and driver.
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not any(devices.glob("nvidia[0-9]*")):
        return ""
    built = f"CUDA {cuda}, for which the driver may be too old" if cuda else "no CUDA"
    return f"this machine has a GPU, but torch {version} finds none; it was built with {built}"


def commit() -> str:
    """HEAD, with a digest of later changes."""
    head, changes = _output("git", "rev-parse", "HEAD"), _output("git", "diff", "HEAD")
    return f"{head}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if head and changes else head


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]


def _output(*command: str) -> str:
    """Output of a command; empty if the command fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    print(json.dumps(asdict(current_environment())))
