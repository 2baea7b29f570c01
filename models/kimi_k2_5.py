"""The text model of Kimi K2.5 to K2.7 by TorchTitan's own specification."""

from torchtitan.models.kimi_k2_7 import model_registry
from torchtitan.protocols.model_spec import ModelSpec

from models import common

FLAVORS = ("debugmodel", "moonlight-16B-A3B", "Kimi-K2.5")


def build(flavor: str, vocab_size: int | None) -> ModelSpec:
    """ModelSpec of a flavor without its vision encoder, which text cannot train; `vocab_size` replaces the flavor's."""
    spec = model_registry(flavor)
    spec.model.vision_encoder = None
    return common.with_vocab_size(spec, vocab_size)
