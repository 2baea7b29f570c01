"""GPT-OSS (arXiv:2508.10925) by TorchTitan's own specification."""

from torchtitan.models.gpt_oss import gptoss_configs, model_registry
from torchtitan.protocols.model_spec import ModelSpec

from models import common

FLAVORS = tuple(gptoss_configs)


def build(flavor: str, vocab_size: int | None) -> ModelSpec:
    """ModelSpec of a flavor; `vocab_size` replaces the flavor's."""
    return common.with_vocab_size(model_registry(flavor), vocab_size)
