"""Final endings of a job, a refusal or a divergence, in torchrun's error files.

torchrun still restarts all processes under `--max-restarts`. A restarted process ends before it imports torch.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from zlib import crc32

ENDED = "titan_muon_ended"


def record_end(message: str, code: int, *, first: bool) -> None:
    """Write the reason and exit code to torchrun's error file, if any. `first`: this rank failed first."""
    if (file := _error_file()) is None:
        return
    # torchrun prints the earliest failure as the root cause.
    seconds = int(time.time()) - int(first)
    text = message if first else "ended with the root cause below"
    record = {"message": {"message": text, "extraInfo": {"timestamp": str(seconds)}}, ENDED: [message, code]}
    file.write_text(json.dumps(record), encoding="utf-8")


def is_first(message: str) -> bool:
    """Whether this rank is the first of this node to end with this error. True without torchrun."""
    if (file := _error_file()) is None:
        return True
    with suppress(FileExistsError):
        (file.parents[1] / f"ended_{crc32(message.encode()):08x}").touch(exist_ok=False)
        return True
    return False


def earlier_end() -> int | None:
    """Exit code of an earlier attempt with a final ending on this node, recorded again; None without one."""
    if (file := _error_file()) is None:
        return None
    # torchrun's layout: RUN/attempt_N/LOCAL_RANK/error.json.
    for path in file.parents[2].glob("attempt_*/*/error.json"):
        with suppress(OSError, ValueError, KeyError):
            message, code = json.loads(path.read_text(encoding="utf-8"))[ENDED]
            # On each rank, because torchrun kills the others at the first exit.
            record_end(message, code, first=True)
            return int(code)
    return None


def _error_file() -> Path | None:
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None
