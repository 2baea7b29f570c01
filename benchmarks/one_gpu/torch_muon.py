"""torch.optim.Muon of examples/torch_muon in recipes, without its installation: `imports`."""

from examples.torch_muon.torch_muon import entry
from titan_muon import registry

registry.optimizers.register("torch_muon", entry)
