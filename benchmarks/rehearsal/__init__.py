"""A training step on GPUs that are not there: fake CUDA tensors of full size, in torch's fake process group.

`fake_gpu` stands in for the machine, `subject` is what a recipe trains on it, `training` takes its steps, `recorder`
looks on, `seen` is what it keeps, and `checks` holds that against the dry run.
"""
