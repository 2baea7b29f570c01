"""A training step on fake GPUs: fake CUDA tensors of full size, in torch's fake process group.

`fake_gpu` replaces the machine, `subject` builds the trainer, `training` takes the steps, `recorder` records, `seen`
holds the records, and `checks` compares them with the dry run.
"""
