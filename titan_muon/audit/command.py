"""The command `titan-muon audit`: runs a training script unchanged and says what its optimizer steps did."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .report import REMEDIES, Report
from .watch import Audit


def main(words: Sequence[str] | None = None) -> int:
    """Run a script under an audit. Returns 1 with findings, and else the script's exit code."""
    parser = argparse.ArgumentParser("titan-muon audit", description=__doc__.partition(":")[2])
    parser.add_argument("--steps", type=int, default=4, help="audited steps of each optimizer, 2 at least (4)")
    parser.add_argument("--memory", type=float, default=2.0, help="GiB of gradients that a rank may keep (2)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a rank waits for the others (60)")
    parser.add_argument("--json", type=Path, help="file for findings and table")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="CODE[:NAMES]", help="do not count these findings"
    )
    parser.add_argument("-m", action="store_true", dest="module", help="the script is a module")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.steps < 2:
        parser.error("--steps: momentum shows in 2 steps at least")
    if unknown := [a for a in options.allow if a.split(":")[0] not in REMEDIES]:
        parser.error(f"--allow {unknown[0]}: choose from {', '.join(REMEDIES)}")
    audit = Audit(options.steps, options.memory * 2**30, options.limit, options.allow)
    audit.open()
    sys.argv = [options.script, *options.args]
    code: str | int | None = 0
    try:
        # The objects of the script live on, because DDP's threads may still use them.
        if options.module:
            sys.path[0] = ""
            audit.alive = runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.script).parent)
            audit.alive = runpy.run_path(options.script, run_name="__main__")
    except SystemExit as done:
        code = done.code
    except BaseException:
        audit.report = Report()
        raise
    audit.close()
    report = audit.report
    if audit.first:
        print(report, file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps(asdict(report), indent=1))
    audit.leave()
    if code:
        print(code, file=sys.stderr) if isinstance(code, str) else None
        return code if isinstance(code, int) else 1
    return int(bool(report.codes))
