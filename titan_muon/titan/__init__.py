"""Titan Muon on TorchTitan: the recipe, the data, the model and the run. The only folder that imports torchtitan."""
