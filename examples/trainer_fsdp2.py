"""Hugging Face Trainer: one process, DDP, or FSDP2 by the configuration of `accelerate launch`.

accelerate launch --config_file examples/fsdp2.json -m examples.trainer_fsdp2
"""

from transformers import PreTrainedModel, Trainer, TrainingArguments

from examples.tiny_llama import Tokens, model
from titan_muon import trainer_optimizer


def train(folder: str, steps: int = 8, resume: bool = False) -> PreTrainedModel:
    options = {"max_steps": steps, "save_steps": 4, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    arguments = TrainingArguments(output_dir=folder, learning_rate=2e-3, weight_decay=0.1, **options)
    llama = model()
    optimizer = trainer_optimizer(llama, arguments)
    trainer = Trainer(llama, arguments, train_dataset=Tokens(), optimizer_cls_and_kwargs=optimizer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


if __name__ == "__main__":
    train("runs/transformers")
