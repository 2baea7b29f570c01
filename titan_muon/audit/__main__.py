"""The command `titan-muon audit`: runs a training script unchanged and says what its optimizer steps did.

Also `python -m titan_muon.audit`, for torchrun.
"""

import argparse
import functools
import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .report import REMEDIES
from .watch import Audit


def main(words: Sequence[str] | None = None) -> int:
    """Run a training script and say what its optimizer steps did. Returns its exit code, or 1 with findings."""
    parser = argparse.ArgumentParser("titan-muon audit", description=main.__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=4, help="audited steps of each optimizer, at least 2 (4)")
    add("--memory", type=float, default=2.0, help="GiB of gradients that a rank may keep (2)")
    add("--limit", type=float, default=60.0, help="seconds that a rank waits for the others (60)")
    add("--json", type=Path, help="file for findings and table")
    add("--allow", action="append", default=[], choices=REMEDIES, metavar="CODE", help="do not count these findings")
    add("-m", action="store_true", dest="module", help="the script is a module")
    add("script")
    add("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.steps < 2:
        parser.error("--steps: momentum shows in at least 2 steps")
    sys.argv, sys.path[0] = [options.script, *options.args], "" if options.module else str(Path(options.script).parent)
    run, code = functools.partial(runpy.run_module, alter_sys=True) if options.module else runpy.run_path, None
    audit = Audit(steps=options.steps, memory=options.memory * 2**30, limit=options.limit, allow=options.allow)
    with audit:
        try:
            # The script's objects live on, because threads of DDP may still use them.
            _namespace = run(options.script, run_name="__main__")
        except SystemExit as done:
            code = done.code
    assert audit.report is not None
    if audit.meeting.rank == 0:
        print(audit.report, file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(asdict(audit.report), indent=1))
    # A launcher ends all ranks with the first one that fails.
    audit.meeting.come("end")
    return int(bool(audit.report.codes)) if code in (None, 0) else code if isinstance(code, int) else 1


if __name__ == "__main__":
    sys.exit(main())
