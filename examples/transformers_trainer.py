"""Hugging Face Trainer: one process, DDP, or FSDP2 through Accelerate.

torchrun --nproc_per_node=2 -m examples.transformers_trainer
"""

from transformers import PreTrainedModel, Trainer, TrainingArguments

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid


def train(folder: str, steps: int = 8, resume: bool = False) -> PreTrainedModel:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    llama = model()
    trainer = Trainer(
        llama,
        arguments,
        train_dataset=Tokens(),
        # Trainer passes the model to the optimizer.
        optimizer_cls_and_kwargs=(Hybrid, {"model": llama, "lr": 2e-3}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


if __name__ == "__main__":
    train("runs/transformers")
