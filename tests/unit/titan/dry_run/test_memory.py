"""What the dry run says of memory that no plan is of."""

import torch

from titan_muon import Muon
from titan_muon.step.foreach import CPU_BYTES
from titan_muon.titan import compat

compat.install()

from titan_muon.titan.dry_run import memory  # noqa: E402
from titan_muon.titan.dry_run.meta_model import MetaModel  # noqa: E402
from titan_muon.titan.recipe import Recipe  # noqa: E402


def test_updates_in_the_dtype_of_their_parameters_are_counted() -> None:
    """A step makes them in calls of at most so many bytes, or of one matrix."""
    for shapes, expected in (
        ({"wide": (64, 4096), "small": (64, 64)}, 64 * 4096 * 4),
        ({f"w{i}": (64, 64) for i in range(4)}, CPU_BYTES),
        ({"small": (8, 8)}, 8 * 8 * 4),
    ):
        parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        optimizer = Muon(list(parameters.items()))
        applies = [apply for run in optimizer.engine.rank.runs for apply in run.applies]
        meta = MetaModel(1, range(1), dict(parameters), (), (), {}, optimizer.plan, 0)
        elements = {name: parameter.numel() for name, parameter in parameters.items()}
        said = memory._update_bytes(meta, elements, Recipe(), "cpu")
        assert max(apply.scratch_bytes for apply in applies) == said == expected
